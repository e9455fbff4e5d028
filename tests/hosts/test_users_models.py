"""Typical models of users: each is grown, or refused with the reason before any work is done."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.training.rng import RngHandle, own_dropout
from tests.core_helpers import EASY_GATES
from tests.hosts.plain_models import GENERATOR, Plain, X, double, task_of
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


@pytest.mark.parametrize(
    ("make", "site", "x"),
    [
        (Tied, "first", X),
        (Normalises, "first", X),
        (double, "first", X.double()),
        (halves, "first", X.bfloat16()),
        (lazy, "0", X),
        (frozen, "first", X),
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


def test_refused_seeds_are_reported(tmp_path: Path) -> None:
    """Squeeze-and-excite for images, planted where features are plain: there is no such blueprint, but wrong shapes."""
    images = torch.randn(96, 1, 4, 4, generator=GENERATOR)

    class Bad(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return h[:, :, 1:]

    from esper.core.blueprints import BLUEPRINTS

    registered = dict(BLUEPRINTS._table)
    BLUEPRINTS.register("cnn", "bad", parameters=lambda channels: 0)(
        lambda channels: nn.Sequential(Bad())
    )
    try:
        model = lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))  # noqa: E731
        grown = grow(task_of(model, "0", "cnn", x=images), tmp_path, "bad")
    finally:
        BLUEPRINTS._table = registered
    assert grown.seeds == {}
    assert "no parameters" in grown.refusals[0]


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


def test_a_grown_network_serves_many_threads(tmp_path: Path) -> None:
    task = task_of(Plain, "first")
    network = grow(task, tmp_path).network
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


def test_a_host_grafted_elsewhere_is_refused_when_a_file_is_loaded(
    tmp_path: Path,
) -> None:
    network = grow(task_of(Plain, "first"), tmp_path).network
    esper.export(network, tmp_path / "saved")
    elsewhere = esper.graft(Plain(), {"r0c0": "last"}, "mlp", example=X)
    with pytest.raises(
        esper.ConfigError,
        match=r"has mlp slots \{'r0c0': 'last'\}, but the saved host was grown with",
    ):
        esper.load_host(tmp_path / "saved", model=elsewhere)
    same = esper.graft(Plain(), {"r0c0": "first"}, "mlp")
    assert torch.equal(esper.load_host(tmp_path / "saved", model=same)(X), network(X))


def test_a_recurrent_network_grows(tmp_path: Path) -> None:
    """Seeds grow on the first tensor of its tuple; logits are returned as in Hugging Face's models."""
    grown = grow(task_of(Recurrent, "gru", "transformer"), tmp_path)
    assert grown.seeds == {"r0c0": "mlp_small"}
    plain = esper.plain(grown.network, X[:3])
    torch.testing.assert_close(
        plain(X)["logits"], grown.network(X), rtol=1e-5, atol=1e-5
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 8, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        h, _ = self.gru(x[:, :, None])
        return {"logits": self.last(h[:, -1])}
