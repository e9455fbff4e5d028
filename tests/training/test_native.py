"""Native passes beside those of PyTorch: the same numbers up to rounding, and the same state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import STYLES
from esper.core.site import Role
from esper.core.stage import SeedStage as S
from esper.data.split import Split
from esper.data.task import Augmentation, Task, resolve
from esper.data.tasks import load_task
from esper.files.grown_host import assemble
from esper.hosts.cnn import CNNHost
from esper.hosts.graft import GraftedHost, graft
from esper.hosts.grown import KeptSeed
from esper.hosts.host import Host
from esper.ops.tape import Unsupported
from esper.training.execution.workers import WorkerExecutor
from esper.training.executor import Cancelled
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.native import NativePasses
from esper.training.native_program import route_of
from esper.training.step import train_epoch
from esper.training.validate import all_off, evaluate
from tests.core.blueprints.test_cnn import NAMES
from tests.core_helpers import digits, make_training, plant, tiny_config
from tests.training.byte_images import byte_digits
from tests.training.native_pairs import (
    both,
    check_alike,
    check_validation,
    doubled,
    state_of,
    trained,
)

STAGES = (S.TRAINING, S.BLENDING, S.FOSSILIZED)


def one(
    optimizer: str = "sgd", incubation: str = "shadow", **task: Any
) -> HostTraining:
    rate = {"learning_rate": 0.01} if optimizer == "adamw" else {}
    values = {"batch_size": 48, "optimizer": optimizer, **rate, **task}
    return make_training(tiny_config(task=values, env={"incubation": incubation}))


def cases() -> Iterator[Any]:
    styles = list(STYLES)
    for number, (blueprint, style) in enumerate(product(NAMES, styles)):
        # Every blueprint in every style; stages, optimizers and ways to incubate in turn.
        stage = STAGES[number % 3]
        optimizer = ("sgd", "adamw")[number // 3 % 2]
        incubation = ("shadow", "ste")[number // 2 % 2]
        yield pytest.param(
            blueprint,
            style,
            stage,
            optimizer,
            incubation,
            id=f"{blueprint} {style} {stage.name} {optimizer} {incubation}",
        )


@pytest.mark.parametrize(
    ("blueprint", "style", "stage", "optimizer", "incubation"), list(cases())
)
def test_an_epoch_and_a_validation_are_those_of_pytorch(
    blueprint: str,
    style: str,
    stage: S,
    optimizer: str,
    incubation: str,
) -> None:
    def make() -> HostTraining:
        training = one(optimizer, incubation)
        plant(training, "r0c0", blueprint, style, stage, target=0.7)
        return training

    eager, native = trained(make)
    check_alike(eager, native)
    check_validation(eager, native)


def of_task(of: Task, **sections: dict[str, Any]) -> HostTraining:
    config = resolve(tiny_config(**sections), of)
    training = HostTraining(0, of, config, make_metrics(1, torch.device("cpu"))[0])
    training.reset(0, 0)
    return training


@pytest.mark.parametrize("incubation", ["shadow", "ste"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_seeds_in_many_slots_and_widenings_learn_side_by_side(
    optimizer: str, incubation: str
) -> None:
    def make() -> HostTraining:
        rate = {"learning_rate": 0.01} if optimizer == "adamw" else {}
        training = of_task(
            digits(),
            env={"slots": ["all"], "incubation": incubation, "at_once": True},
            task={
                "batch_size": 48,
                "optimizer": optimizer,
                "label_smoothing": 0.1,
                "max_grad_norm": 0.1,
                **rate,
            },
        )
        plant(training, "r0c0", "conv_light", "LINEAR_ADD", S.TRAINING, 0.7)
        plant(training, "r2c0", "widen_half", "LINEAR_ADD", S.TRAINING, 1.0)
        plant(training, "r1c0", "norm", "GATED_GATE", S.BLENDING, 0.3)
        plant(training, "r0c1", "bottleneck", "LINEAR_MULTIPLY", S.FOSSILIZED, 0.5)
        plant(training, "r2c1", "widen_whole", "LINEAR_ADD", S.BLENDING, 0.5)
        return training

    eager, native = trained(make, 2)
    check_alike(eager, native, 1e-4)
    check_validation(eager, native, 1e-3)


TASKS: dict[str, Callable[[], HostTraining]] = {
    "images in bytes, fused blocks": lambda: of_task(byte_digits()),
    "cropped and mirrored": lambda: of_task(
        byte_digits(16, channels=3, augmentation=Augmentation(crop=2, flip=True))
    ),
    "a table": lambda: of_task(load_task("digits_table")),
    "28 by 28": lambda: of_task(images(28)),
    "9 by 9": lambda: of_task(images(9)),
    "a frozen body": lambda: one(freeze="body"),
    "seeds with a rate of their own": lambda: one(
        seed_rate=0.5, seed_warmup_epochs=1.5, warmup_epochs=0.7
    ),
    "seeds with AdamW's": lambda: one("adamw", seed_rate=0.5, warmup_epochs=0.7),
    "a batch of 17": lambda: one(batch_size=17),
    "without momentum": lambda: one(momentum=0.0),
    "with decay": lambda: one(weight_decay=0.01),
}


def images(side: int) -> Task:
    """Digits on a larger sheet, for three blocks whose pools leave a row over."""
    parts = {}
    for name in ("train", "validation", "test"):
        split = getattr(digits(), name)
        x = nn.functional.pad(split.x, (0, side - 8, 0, side - 8))
        parts[name] = Split(x[:96], split.y[:96])
    return replace(
        digits(), build_host=lambda: CNNHost(1, 10, base=4, blocks=3), **parts
    )


IN_FLOAT64 = ("28 by 28", "9 by 9")
"""Tasks whose many equal pixels make ties, which rounding decides."""


@pytest.mark.parametrize("name", TASKS)
def test_data_rates_and_frozen_layers_are_those_of_pytorch(name: str) -> None:
    def make() -> HostTraining:
        training = TASKS[name]()
        for site, stage in zip(training.sites, (S.TRAINING, S.BLENDING), strict=False):
            blueprint = "widen_half" if site.place.has_source else "norm"
            plant(training, site.name, blueprint, stage=stage, target=0.6)
        if name in IN_FLOAT64:
            return doubled(training)
        return training

    eager, native = trained(make, 2)
    if name in IN_FLOAT64:
        check_alike(eager, native, 1e-9)
        return
    check_alike(eager, native, 1e-4)
    check_validation(eager, native, 1e-3)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("incubation", ["shadow", "ste"])
def test_epochs_in_float64_are_those_of_pytorch_to_the_ninth_digit(
    optimizer: str, incubation: str
) -> None:
    def make() -> HostTraining:
        training = one(optimizer, incubation)
        plant(training, "r0c0", "bottleneck", "GATED_GATE", S.TRAINING, 0.5)
        plant(training, "r0c1", "conv_light", "LINEAR_MULTIPLY", S.BLENDING, 0.5)
        return doubled(training)

    eager, native = trained(make, 3)
    check_alike(eager, native, 1e-9)


def test_a_delta_above_its_limit_learns_from_the_samples_that_are_there() -> None:
    """Straight through, it turns and shrinks; a lane without a sample has a delta, too."""

    def make() -> HostTraining:
        of = load_task("digits_table")
        training = of_task(
            of, env={"incubation": "ste"}, task={"batch_size": 17, "momentum": 0.0}
        )
        site = plant(training, "r0c0", "mlp")
        assert site.seed is not None
        with torch.no_grad():
            list(site.seed.parameters())[-1].fill_(100.0)
        return doubled(training)

    eager, native = trained(make)
    check_alike(eager, native, 1e-9)


def grown_host() -> Host:
    """A host with seeds built in twice, of which one reads a source."""
    torch.manual_seed(0)
    host: Host = digits().new_host(["all"])
    levels = [
        {"r0c0": ("conv_light", 1.0), "r2c0": ("widen_half", 0.7)},
        {"r0c0": ("norm", 0.5)},
    ]
    for seeds in levels:
        kept = {}
        blueprints = {}
        places = {place.name: place for place in host.sites}
        for slot, (name, alpha) in seeds.items():
            kept[slot] = KeptSeed(name, "LINEAR_ADD", alpha)
            blueprints[slot] = BLUEPRINTS.at("cnn", places[slot], name)
        host = assemble(host, kept, blueprints, "digits")
    for parameter in host.parameters():
        nn.init.normal_(parameter, std=0.3)
    return host


@pytest.mark.parametrize("incubation", ["shadow", "ste"])
def test_seeds_that_are_built_into_a_host_are_a_part_of_its_native_passes(
    incubation: str,
) -> None:
    def make() -> HostTraining:
        task = replace(digits(), build_host=grown_host)
        values = {"batch_size": 48, "samples_per_epoch": 96}
        training = of_task(task, env={"incubation": incubation}, task=values)
        assert len(training.host_group.parameters) > 15
        plant(training, "r0c0", "bottleneck", "GATED_GATE", S.BLENDING, 0.4)
        plant(training, "r2c0", "widen_quarter", "LINEAR_ADD", S.TRAINING, 0.8)
        return doubled(training)

    eager, native = trained(make, 2)
    check_alike(eager, native, 1e-9)
    check_validation(eager, native, 1e-9)


def spoil(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        next(module.parameters()).flatten()[0] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e20])
@pytest.mark.parametrize("incubation", ["shadow", "ste"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_seed_that_is_not_finite_is_cut_as_pytorch_cuts_it(
    stage: S, incubation: str, value: float
) -> None:
    def make() -> HostTraining:
        training = one("sgd", incubation)
        site = plant(training, "r0c0", "conv_light", "LINEAR_ADD", stage, 0.7)
        plant(training, "r0c1", "conv_light", "LINEAR_ADD", S.BLENDING, 0.7)
        assert site.seed is not None
        spoil(site.seed, value)
        return training

    eager, native = trained(make)
    for one_site, other in zip(eager.sites, native.sites, strict=True):
        if one_site.planted is not None and other.planted is not None:
            assert bool(one_site.planted.finite) == bool(other.planted.finite)
    check_alike(eager, native, 1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_host_that_is_not_finite_stands_still_as_in_pytorch(value: float) -> None:
    def make() -> HostTraining:
        training = one()
        spoil(training.host, value)
        return training

    eager, native = trained(make)
    assert torch.equal(
        torch.isnan(eager.gradient_stats.total),
        torch.isnan(native.gradient_stats.total),
    )
    for (name, tensor), other in zip(
        eager.host.named_parameters(), native.host.parameters(), strict=True
    ):
        torch.testing.assert_close(other, tensor, equal_nan=True, msg=name)


def test_the_bits_are_the_same_for_any_number_of_workers() -> None:
    found = []
    for workers in (1, 2):
        trainings = [make_training(tiny_config(), index) for index in range(3)]
        for training in trainings:
            plant(training, "r0c0", "conv_light")
        with WorkerExecutor(workers, native=True) as executor:
            executor.adopt(trainings)
            executor.train(trainings)
            assert executor.reasons() == {}
            executor.release(trainings)
        found.append([state_of(training) for training in trainings])
    for first, second in zip(*found, strict=True):
        for name, tensor in first.items():
            assert torch.equal(tensor, second[name]), name


def test_a_flag_ends_an_epoch_between_two_batches() -> None:
    training = one()
    flag = torch.ones((), dtype=torch.bool)
    training.native = NativePasses(training, flag.data_ptr())
    with pytest.raises(Cancelled, match="env 0, epoch 0: cancelled before batch 0"):
        train_epoch(training)
    assert training.epoch == 0


def test_seeds_of_earlier_epochs_leave_no_trace() -> None:
    """Programs are kept by what they depend on; a seed in the memory of another one is another program."""
    eager, native = both(one)
    for blueprint in ("conv_light", "norm", "conv_light"):
        for training in (eager, native):
            plant(training, "r0c0", blueprint, stage=S.TRAINING)
            train_epoch(training)
            training.assign(training.sites[0], Role.BLENDED, 0.5, 1.0, True)
            train_epoch(training)
            training.remove(training.sites[0])
            train_epoch(training)
    check_alike(eager, native, 1e-3)


class Doubles(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return 2 * h


def vectors(model: nn.Module) -> GraftedHost:
    return graft(model, ["0"], "mlp", example=torch.zeros(2, 4))


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].register_forward_hook(lambda _module, _inputs, output: 2 * output)
    return model


def patched() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].forward = lambda h: h[:, :2]  # type: ignore[method-assign]
    return model


def tied() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 2))


def hooked_outside() -> nn.Module:
    """The hook is that of a container, which a tape takes apart."""
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    )
    model[1].register_forward_hook(lambda _module, _inputs, output: 2 * output)
    return model


def without_statistics() -> nn.Module:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    # A bias in front of the norm would have a gradient of zero, or of what rounding left.
    return nn.Sequential(nn.Linear(4, 4, bias=False), norm, nn.Linear(4, 2))


UNSUPPORTED = {
    "a Doubles": lambda: nn.Sequential(nn.Linear(4, 4), Doubles(), nn.Linear(4, 2)),
    "with hooks": hooked,
    "Sequential with hooks": hooked_outside,
    "Linear with hooks": patched,
    "several layers share": tied,
    "dropout": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)),
    "PReLU": lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 2)),
}


def of_vectors(model: Callable[[], nn.Module]) -> Task:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    split = Split(x, (x[:, 0] > 0).long())
    return Task(
        name="vectors",
        classes=2,
        build_host=lambda: vectors(model()),
        train=split,
        validation=split,
        test=split,
    )


@pytest.mark.parametrize("words", UNSUPPORTED)
def test_what_has_no_compiled_form_is_named_and_left_to_pytorch(words: str) -> None:
    def make() -> HostTraining:
        task = of_vectors(UNSUPPORTED[words])
        if words == "several layers share":
            task = replace(task, build_host=lambda: graft(tied(), ["1"], "mlp"))
        return of_task(task)

    eager, native = both(make)
    assert native.native is not None
    obstacle = native.native.obstacle()
    assert obstacle is not None
    assert words.removeprefix("a ") in obstacle
    train_epoch(eager)
    train_epoch(native)
    assert list(native.native.reasons.items()) == [(obstacle, 1)]
    for name, tensor in state_of(eager).items():
        assert torch.equal(state_of(native)[name], tensor), name


@pytest.mark.parametrize(
    ("task", "words"),
    [({"micro_batches": 2}, "micro-batches"), ({"precision": "bfloat16"}, "bfloat16")],
)
def test_settings_that_only_pytorch_has_are_named(
    task: dict[str, Any], words: str
) -> None:
    obstacle = NativePasses(one(**task)).obstacle()
    assert obstacle is not None
    assert words in obstacle


def test_a_host_that_overrides_its_pass_is_left_to_pytorch() -> None:
    class Louder(CNNHost):
        def run(self, module: nn.Module, h: Tensor) -> Tensor:
            return 2 * super().run(module, h)

    with pytest.raises(Unsupported, match="a Louder has no compiled form"):
        route_of(Louder(1, 10, base=3, blocks=2))


def test_auto_leaves_hosts_to_pytorch_whose_steps_it_does_faster() -> None:
    """A pass of the host of digits has 9 + 27 products for each of 3 and 6 channels, and a linear layer."""
    flops = 2 * 3 * 48 * (64 * 3 * 9 + 16 * 6 * 27 + 6 * 10)
    small = one()
    assert NativePasses(small, most_flops=3 * flops).obstacle() is None
    assert NativePasses(small).obstacle() is None
    obstacle = NativePasses(small, most_flops=flops / 3).obstacle()
    assert obstacle is not None
    assert "PyTorch is faster" in obstacle
    exact = NativePasses(small)
    assert exact._flops == flops


def test_a_norm_without_statistics_of_its_own_is_evaluated_in_whole_batches() -> None:
    eager, native = trained(lambda: of_task(of_vectors(without_statistics)))
    check_alike(eager, native)
    expected = evaluate(eager, eager.task.validation, [all_off(eager)])
    found = evaluate(native, native.task.validation, [all_off(native)])
    torch.testing.assert_close(found.stats, expected.stats)
    assert native.native is not None
    (reason,) = native.native.reasons
    assert "statistics of a batch" in reason


def test_a_host_in_float64_trains_natively_and_its_seeds_by_pytorch() -> None:
    """Alphas are float32, and a tape has one dtype."""
    task = of_vectors(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    )
    parts = {}
    for name in ("train", "validation", "test"):
        split = getattr(task, name)
        parts[name] = Split(split.x.double(), split.y)

    def build() -> GraftedHost:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        return graft(
            model, ["0"], "mlp", example=torch.zeros(2, 4, dtype=torch.float64)
        )

    eager, native = both(lambda: of_task(replace(task, build_host=build, **parts)))
    for training in (eager, native):
        train_epoch(training)
        plant(training, "r0c0", "norm", stage=S.BLENDING)
        train_epoch(training)
    assert native.native is not None
    assert list(native.native.reasons) == [
        "a network of torch.float32, torch.float64 has no compiled form"
    ]
    for name, tensor in state_of(eager).items():
        torch.testing.assert_close(state_of(native)[name], tensor, rtol=1e-6, atol=1e-6)
