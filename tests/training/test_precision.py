"""L3: sixteen bits. What is computed in them and what is not, and that seeds and hosts keep all that they promise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

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
from esper.training.host_training import HostTraining
from esper.training.precision import concrete
from esper.training.step import prepare_epoch, train_step
from esper.training.validate import evaluate
from tests.core_helpers import digits, plant, same_bits, tensors_of, tiny_config, train
from tests.selection import slow_except
from tests.training.byte_images import byte_digits
from tests.training.test_foreign_hosts import grafted, language, of, training_of

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


@contextmanager
def watched(
    training: HostTraining,
) -> Iterator[list[tuple[str, torch.dtype, torch.dtype]]]:
    """(slot, dtype of the features that go in, dtype of the delta) of every pass through a seed."""
    seen: list[tuple[str, torch.dtype, torch.dtype]] = []
    hooks = []
    for slot in training.sites:
        if slot.seed is not None:

            def note(
                _seed: nn.Module, inputs: Any, delta: Tensor, name: str = slot.name
            ) -> None:
                seen.append((name, inputs[0].dtype, delta.dtype))

            hooks.append(slot.seed.register_forward_hook(note))
    yield seen
    for hook in hooks:
        hook.remove()


STYLES = ("LINEAR_ADD", "LINEAR_MULTIPLY", "GATED_GATE")


@pytest.mark.finding("L3")
@pytest.mark.parametrize(
    ("task", "blueprint", "style"),
    slow_except(
        [(*case, STYLES[number % 3]) for number, case in enumerate(CASES)],
        [(*case, style) for case in CASES for style in STYLES],
    ),
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
        with watched(training) as seen:
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
        assert {dtype for _, dtype, _ in seen} == {features}
        loss_sum, _, count, _, bad = training.totals.training.tolist()
        assert 0 < loss_sum / count < 10
        assert bad == 0
        for group in groups:
            assert {p.dtype for p in group.parameters} == {torch.float32}
            assert {p.grad.dtype for p in group.parameters if p.grad is not None} == {
                torch.float32
            }
            assert {
                state["momentum_buffer"].dtype
                for state in group.optimizer.state.values()
            } == {torch.float32}
        assert all(
            bool(slot.planted.finite)
            for slot in training.sites
            if slot.planted is not None
        )


@pytest.mark.finding("L3")
@pytest.mark.parametrize("incubation", ["shadow", "ste"])
@pytest.mark.parametrize("task", [*TASKS, "grafted"])
def test_an_incubating_seed_changes_no_bit_of_a_host_in_bfloat16(
    task: str, incubation: str
) -> None:
    made = of(grafted(modules=0.5)) if task == "grafted" else TASKS[task]()
    sections: dict[str, Any] = {**BF16, "env": {"incubation": incubation}}
    alone, growing = training_of(made, **sections), training_of(made, **sections)
    names = [growing.sites[0].name, growing.sites[-1].name]
    for name in names:
        plant(
            growing,
            name,
            BLUEPRINTS.names(growing.host.topology, growing.host.sites)[-1],
        )
    born = tensors_of(growing, tuple(names))
    for _ in range(2):
        train(alone)
        train(growing)
        same_bits(tensors_of(alone), tensors_of(growing))
        assert torch.equal(alone.totals.training, growing.totals.training)
        off = (0.0,) * len(alone.sites)
        trials = [
            tuple(float(slot.name == name) for slot in growing.sites) for name in names
        ]
        found = evaluate(growing, made.validation, [off, *trials])
        assert torch.equal(
            found.stats[0], evaluate(alone, made.validation, [off]).stats[0]
        )
        same_bits(tensors_of(alone), tensors_of(growing))
    learned = tensors_of(growing, tuple(names))
    for name in names:
        assert any(
            not torch.equal(born[key], learned[key])
            for key in born
            if key.startswith(name)
        )


@pytest.mark.finding("L3")
def test_a_grafted_network_of_a_user_learns_in_bfloat16_and_layers_may_choose_float32() -> (
    None
):
    seen: list[torch.dtype] = []

    class Careful(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            seen.append(h.dtype)
            with torch.autocast("cpu", enabled=False):
                return torch.log1p(h.float().exp())

    def build_host() -> Host:
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            Careful(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128, 10),
        )
        return graft(model, {"r0c0": "0"})

    training = training_of(
        of(build_host), task={"precision": "bfloat16", "samples_per_epoch": 640}
    )
    plant(training, "r0c0", stage=S.BLENDING, target=0.7)
    before = evaluate(training, digits().validation, [(0.7,)])
    train(training, 4)
    after = evaluate(training, digits().validation, [(0.7,)])
    assert set(seen[-4:]) == {torch.bfloat16}
    assert after.accuracy[0] > before.accuracy[0] + 40


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
    training = training_of(digits())
    assert training.arithmetic.precision == "float32"
    seen: list[torch.dtype] = []
    training.host.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    next(training.host.children()).register_forward_hook(
        lambda _m, _i, out: seen.append(out.dtype)
    )
    for segment in training.host.segments:  # type: ignore[union-attr]
        segment.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    train(training)
    assert set(seen) == {torch.float32}
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
