"""L3: sixteen bits. What is computed in them and what is not, and that seeds and hosts keep all that they promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.core.blueprints import BLUEPRINTS
from esper.core.place import Place
from esper.core.stage import SeedStage as S
from esper.data.split import Split
from esper.data.task import Task, resolve
from esper.env.vector_env import GrowthVectorEnv
from esper.hosts.graft import graft
from esper.hosts.host import Host, SegmentedHost
from esper.hosts.transformer import TransformerHost
from esper.training import precision
from esper.training.precision import concrete
from esper.training.step import prepare_epoch, train_step
from esper.training.validate import evaluate
from tests.core_helpers import digits, plant, same_bits, tensors_of, tiny_config, train
from tests.training.byte_images import byte_digits
from tests.training.test_foreign_hosts import language, of, training_of

BF16 = {"task": {"precision": "bfloat16"}}


def mlp_task() -> Task:
    def flat(split: object) -> Split:
        assert isinstance(split, Split)
        return Split(split.x.flatten(1), split.y)

    base = digits()

    def build_host() -> Host:
        segments = [
            nn.Sequential(nn.Linear(64, 16), nn.ReLU()),
            nn.Sequential(nn.Linear(16, 16), nn.ReLU()),
        ]
        return SegmentedHost(
            [*segments, nn.Linear(16, 10)],
            [Place("r0c0", 16), Place("r0c1", 16)],
            "mlp",
        )

    return Task(
        "mlp", 10, build_host, flat(base.train), flat(base.validation), flat(base.test)
    )


def text_task() -> Task:
    return replace(
        language(),
        build_host=lambda: TransformerHost(
            vocabulary=7, width=16, layers=2, heads=2, block=6, slots=2
        ),
    )


TASKS: dict[str, Callable[[], Task]] = {
    "cnn": digits,
    "fused cnn": byte_digits,
    "transformer": text_task,
    "mlp": mlp_task,
}
TOPOLOGY = {"fused cnn": "cnn"}
CASES = [
    (task, name)
    for task in TASKS
    for name in BLUEPRINTS.names(TOPOLOGY.get(task, task))
]


STYLES = ("LINEAR_ADD", "LINEAR_MULTIPLY", "GATED_GATE")


@pytest.mark.finding("L3")
@pytest.mark.parametrize(
    ("task", "blueprint", "style"),
    [(*case, STYLES[number % 3]) for number, case in enumerate(CASES)],
)
def test_every_parameter_of_every_seed_is_alive_in_bfloat16(
    task: str, blueprint: str, style: str
) -> None:
    for stage in (S.TRAINING, S.HOLDING):
        training = training_of(TASKS[task](), **BF16)
        for slot in training.sites:
            plant(training, slot.name, blueprint, style, stage)
        alive: set[tuple[str, str]] = set()
        named = [
            (slot.name, name, p)
            for slot in training.sites
            if slot.seed
            for name, p in slot.seed.named_parameters()
        ]
        seen = set[torch.dtype]()
        for slot in training.sites:
            assert slot.seed is not None
            slot.seed.register_forward_pre_hook(
                lambda _m, x, seen=seen: seen.add(x[0].dtype)
            )
        groups = prepare_epoch(training)
        assert training.feed is not None
        for batch in range(2):
            train_step(training, groups, *training.feed.batch(batch))
            for slot, name, parameter in named:
                assert parameter.grad is not None
                assert bool(torch.isfinite(parameter.grad).all()), (slot, name)
                if float(parameter.grad.norm()) > 0:
                    alive.add((slot, name))
        assert alive == {(slot, name) for slot, name, _ in named}, stage
        # The residual stream of a transformer is float32, as autocast leaves sums with an embedding.
        features = torch.float32 if task == "transformer" else torch.bfloat16
        assert seen == {features}
        loss_sum, _, count, _, bad = training.totals.training.tolist()
        assert 0 < loss_sum / count < 10
        assert bad == 0
        for group in groups:
            states = [s["momentum_buffer"] for s in group.optimizer.state.values()]
            kept = [*group.parameters, *states]
            assert {tensor.dtype for tensor in kept} == {torch.float32}


@pytest.mark.finding("L3")
@pytest.mark.slow
@pytest.mark.parametrize("side", [8, 16])
def test_bfloat16_learns_as_well_as_float32(side: int) -> None:
    """The same hosts, orders and seeds; what differs is rounding, which moves single images and not the mean."""
    accuracies: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    losses: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    for name, found in accuracies.items():
        for index in range(3):
            training = training_of(
                byte_digits(side),
                index=index,
                task={
                    "precision": name,
                    "samples_per_epoch": 997,
                    "batch_size": 32,
                    "learning_rate": 0.05,
                },
                env={"episode_length": 6},
            )
            plant(training, "r1c0", stage=S.HOLDING)
            train(training, 6)
            result = evaluate(
                training,
                training.task.validation,
                [tuple(slot.alpha for slot in training.sites)],
            )
            found.append(float(result.accuracy[0]))
            losses[name].append(float(result.loss[0]))
    means = {name: sum(found) / 3 for name, found in accuracies.items()}
    assert min(means.values()) > 85
    assert abs(means["float32"] - means["bfloat16"]) < 2
    assert losses["float32"] != losses["bfloat16"]  # it really was computed otherwise


# Choosing one


@pytest.mark.finding("L3")
def test_auto_is_bfloat16_where_the_device_multiplies_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    assert (
        "avx512bf16" in precision.cpu_features()
    )  # a name that is not there would always be false
    for there, wanted in ((True, "bfloat16"), (False, "float32")):
        monkeypatch.setattr(
            precision,
            "cpu_features",
            lambda there=there: {"avx512bf16": there, "avx2": True},
        )
        assert concrete("auto", cpu) == wanted
        assert (
            training_of(digits(), task={"precision": "auto"}).arithmetic.precision
            == wanted
        )
        assert [concrete(name, cpu) for name in ("float32", "bfloat16", "float16")] == [
            "float32",
            "bfloat16",
            "float16",
        ]
    for capability, wanted in (
        ((7, 5), "float32"),
        ((8, 0), "bfloat16"),
        ((9, 0), "bfloat16"),
    ):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda _device, found=capability: found
        )
        assert concrete("auto", torch.device("cuda")) == wanted


@pytest.mark.finding("L3")
def test_sixteen_bits_are_refused_where_torch_has_no_autocast() -> None:
    with pytest.raises(
        ConfigError,
        match="bfloat16, which works on cpu and cuda; on mps it has to be float32",
    ):
        concrete("bfloat16", torch.device("mps"))
    assert concrete("auto", torch.device("mps")) == "float32"


@pytest.mark.finding("L3")
def test_digits_are_float32_by_default() -> None:
    config = resolve(tiny_config(), digits())
    assert config.task.precision == digits().precision == "float32"
    assert training_of(digits()).arithmetic.precision == "float32"
    assert (
        resolve(tiny_config(**BF16), digits()).task.precision == "bfloat16"
    )  # the config has the last word


@pytest.mark.finding("L3")
def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"task\.precision: .*'float32', 'bfloat16' or 'float16', not 'fp16'",
    ):
        tiny_config(task={"precision": "fp16"})
    with pytest.raises(ConfigError, match=r"task\.precision: .*not 'half'"):
        resolve(tiny_config(), replace(digits(), precision="half"))  # type: ignore[arg-type]


def test_a_host_is_tried_in_the_precision_that_it_will_run_in() -> None:
    class Complex(nn.Module):
        """There are no complex numbers of two bfloat16."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(1, 8, 3), nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(torch.complex(x, x).abs()).mean((2, 3)))  # type: ignore[no-any-return]

    task = replace(
        byte_digits(), build_host=lambda: graft(Complex(), {"r0c0": "first"})
    )
    GrowthVectorEnv(task, tiny_config()).close()
    with pytest.raises(
        ConfigError,
        match=r"cannot run on inputs torch.bfloat16 of shape \(3, 1, 8, 8\)",
    ):
        GrowthVectorEnv(task, tiny_config(**BF16))


# Threads


class Twice(nn.Module):
    """One layer that runs two times; in between, ``between`` happens."""

    def __init__(self, between: Callable[[], None]) -> None:
        super().__init__()
        self.layer, self.between = nn.Linear(64, 64), between

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.layer(x))
        self.between()
        return torch.relu(self.layer(h))


def test_a_layer_that_runs_twice_has_the_same_gradient_whatever_other_threads_do() -> (
    None
):
    """torch's cache of casts is one for all threads, and is emptied wherever a pass ends."""

    def trained(between: Callable[[], None]) -> dict[str, Tensor]:
        def build_host() -> Host:
            model = nn.Sequential(nn.Flatten(), Twice(between), nn.Linear(64, 10))
            return graft(model, {"r0c0": "1"}, topology="mlp")

        training = training_of(of(build_host), **BF16)
        train(training)
        return tensors_of(training)

    same_bits(trained(lambda: None), trained(torch.clear_autocast_cache))
