"""Typical models of users: each is grown, or refused with the reason before any work is done."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.hosts.grown import GrownHost, KeptSeed
from esper.training.rng import RngHandle, own_dropout
from tests.core_helpers import EASY_GATES
from tests.hosts.grown_modules import seed_of
from tests.hosts.plain_models import Plain, X, double, task_of
from tests.run.test_grow import SCHEDULE


def grow(
    task: esper.Task, tmp_path: Path, blueprint: str = "mlp_small"
) -> esper.run.grow.Grown:
    (tmp_path / "s.toml").write_text(SCHEDULE.replace("conv_light", blueprint))
    config = esper.TrainingConfig.parse(
        {
            "run": {"lanes": 1},
            "env": {
                "baseline_episodes": 1,
                "gates": EASY_GATES,
                "parameter_budget": 1000,
            },
        }
    )
    return esper.grow(task, f"schedule:{tmp_path / 's.toml'}", epochs=7, config=config)


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(6, 8)
        self.again.weight = self.first.weight
        self.register_buffer("mask", torch.full((8,), float("-inf")))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x)) + torch.relu(self.again(x))
        return self.last(torch.maximum(h, self.mask))  # type: ignore[no-any-return]


class Normalises(Plain):
    """Overwrites its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        x -= x.mean()
        return super().forward(x)  # type: ignore[no-any-return]


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))


def frozen() -> nn.Module:
    return Plain().requires_grad_(False)


def halves() -> nn.Module:
    return Plain().bfloat16()


MODELS = [
    (Normalises, "first", X),
    (Tied, "first", X),
    (double, "first", X.double()),
    (halves, "first", X.bfloat16()),
    (lazy, "0", X),
    (frozen, "first", X),
]


@pytest.mark.parametrize(
    ("make", "site", "x"),
    [
        pytest.param(*case, marks=pytest.mark.slow if number else ())
        for number, case in enumerate(MODELS)
    ],
)
def test_a_users_model_grows_and_is_loaded_from_its_files(
    make: Callable[[], nn.Module], site: str, x: Tensor, tmp_path: Path
) -> None:
    task = task_of(make, site, x=x)
    before = x.clone()
    grown = grow(task, tmp_path)
    assert torch.equal(x, before)
    assert (grown.seeds, grown.refusals) == ({"r0c0": "mlp_small"}, ())
    esper.export(grown.network, tmp_path / "saved")
    model = make()
    if make is lazy:
        model(x[:2])
    loaded = esper.load_host(tmp_path / "saved", model=model)
    assert torch.equal(loaded(task.test.x), grown.network(task.test.x))
    assert esper.accuracy(loaded, task.test.x, task.test.y) == grown.accuracy


def test_layers_that_were_frozen_in_eval_mode_stay_so() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)
    )
    model[1].eval()
    host = esper.graft(model, {"r0c0": "0"}, example=torch.randn(3, 1, 4, 4))
    host.eval()
    host.train()
    assert [layer.training for layer in model] == [True, False, True, True]
    dropping = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Dropout(0.5), nn.Flatten())
    dropping[1].eval()
    host = esper.graft(dropping, {"r0c0": "0"})
    own_dropout(host, RngHandle(torch.Generator()))
    x = torch.randn(3, 1, 4, 4)
    assert torch.equal(host.train()(x), host.eval()(x))
    whole = esper.graft(copy.deepcopy(model).eval(), {"r0c0": "0"}).train()
    assert all(
        module.training for module in whole.model.modules()
    )  # a model that was merely in use


def test_a_grown_network_serves_many_threads() -> None:
    host = esper.graft(Plain(), {"r0c0": "first"}, "mlp", example=X)
    kept = {"r0c0": KeptSeed("mlp_small", "LINEAR_ADD", 1.0)}
    network = GrownHost(host, {"r0c0": seed_of("mlp_small")}, kept, "mine").eval()
    wanted = network(X)
    wrong: list[float] = []

    def serve() -> None:
        with torch.no_grad():
            wrong.extend(float((network(X) - wanted).abs().max()) for _ in range(30))

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 60
    assert max(wrong) == 0
