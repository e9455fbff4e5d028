"""Need: the same natively as by PyTorch, without a trace in the run, and larger for hosts that are too narrow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from esper.core.stage import SeedStage as S
from esper.data.split import Split
from esper.data.task import Task, resolve
from esper.hosts.cnn import CNNHost
from esper.hosts.graft import GraftedHost, graft
from esper.hosts.host import Host
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.native import NativePasses
from esper.training.need import NeedMeter
from esper.training.step import train_epoch
from tests.core_helpers import digits, plant, tiny_config
from tests.training.byte_images import byte_digits
from tests.training.growing import regression, text
from tests.training.test_native import state_of


def host_of(
    task: Task, seed: int = 0, native: bool = False, **values: object
) -> HostTraining:
    config = resolve(tiny_config(task=values), task)
    training = HostTraining(0, task, config, make_metrics(1, torch.device("cpu"))[0])
    training.reset(seed, 0)
    if native:
        training.native = NativePasses(training)
    return training


def with_sources(task: Task | None = None, base: int = 3) -> Task:
    """A CNN with widening sites, and a residual site between them."""

    def build() -> CNNHost:
        host = CNNHost(1, 10, base=base, blocks=2, rows=2)
        host.use_slots(["r0c0", "r2"])
        return host

    return replace(task or digits(), build_host=build)


def mlp(*widths: int) -> GraftedHost:
    layers: list[nn.Module] = []
    inputs = 8
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    sites = {f"r2c{n}": f"{2 * n} -> {2 * n + 2}" for n in range(len(widths))}
    return graft(nn.Sequential(*layers, nn.Linear(inputs, 4)), sites, topology="mlp")


def made(build: Callable[[], nn.Module], noise: bool = False) -> Task:
    """A task of vectors, whose four labels a random network with 12 hidden units gives, or only chance."""
    draws = torch.Generator().manual_seed(3)
    x = torch.randn(640, 8, generator=draws)
    first, second = (
        torch.randn(8, 12, generator=draws),
        torch.randn(12, 4, generator=draws),
    )
    y = ((x @ first).relu() @ second).argmax(dim=1)
    if noise:
        y = torch.randint(0, 4, y.shape, generator=draws)
    split = Split(x, y)
    return replace(
        digits(),
        name="made",
        classes=4,
        build_host=build,
        train=split,
        validation=split,
        test=split,
    )


def measured(training: HostTraining) -> Tensor:
    meter = NeedMeter(training)
    meter.measure()
    return meter.values


def mean_need(training: HostTraining, epochs: int, batches: int = 40) -> Tensor:
    """The mean over many batches, after ``epochs``."""
    for _ in range(epochs):
        train_epoch(training)
    meter = NeedMeter(training)
    total = torch.zeros_like(meter.values)
    for number in range(batches):
        training.epoch = 1000 + number  # chooses the batch
        meter.measure()
        total += meter.values
    return total / batches


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    "task",
    [with_sources(), with_sources(byte_digits(), base=8), made(lambda: mlp(4, 6))],
)
def test_native_need_is_that_of_pytorch(task: Task, smoothing: float) -> None:
    found = []
    for native in (False, True):
        training = host_of(task, native=native, label_smoothing=smoothing)
        train_epoch(training)
        found.append(measured(training))
    assert training.native is not None
    assert training.native.reasons == {}
    assert found[0].isfinite().any()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-7, equal_nan=True)


def test_need_with_a_blended_seed_is_the_same_natively() -> None:
    found = []
    for native in (False, True):
        training = host_of(with_sources(), native=native)
        plant(training, "r0c0", stage=S.FOSSILIZED)
        plant(training, "r2c1", "widen_half", stage=S.TRAINING)
        train_epoch(training)
        found.append(measured(training))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-7, equal_nan=True)
    by_name = dict(
        zip(training.site_by_name, found[0].isfinite().tolist(), strict=True)
    )
    assert by_name == {"r0c0": False, "r2c0": True, "r2c1": False}


@pytest.mark.parametrize("native", [False, True])
def test_measuring_need_changes_no_bit_of_the_run(native: bool) -> None:
    states = []
    for measures in (False, True):
        training = host_of(with_sources(byte_digits()), native=native)
        plant(training, "r0c0", stage=S.TRAINING)
        meter = NeedMeter(training)
        random = torch.get_rng_state()
        for _ in range(3):
            train_epoch(training)
            if measures:
                before = [p.grad for p in training.host.parameters()]
                meter.measure()
                after = [p.grad for p in training.host.parameters()]
                assert all(a is b for a, b in zip(after, before, strict=True))
        assert torch.equal(torch.get_rng_state(), random)
        states.append(state_of(training))
        states[-1]["order"] = training.order.get_state()
        states[-1]["dropout"] = training.dropout.get_state()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def test_measuring_need_draws_no_random_number_of_a_host_with_dropout() -> None:
    def build() -> GraftedHost:
        layers = [
            nn.Linear(8, 6),
            nn.ReLU(),
            nn.Linear(6, 6),
            nn.Dropout(0.5),
            nn.Linear(6, 4),
        ]
        return graft(nn.Sequential(*layers), {"r2c0": "0 -> 2"}, topology="mlp")

    training = host_of(made(build))
    train_epoch(training)
    before = training.dropout.get_state()
    assert measured(training).isfinite().all()
    assert torch.equal(training.dropout.get_state(), before)
    assert training.draws.generator is training.dropout


def test_a_host_with_a_too_narrow_layer_needs_more_than_one_that_is_wide_enough() -> (
    None
):
    def need(*widths: int) -> Tensor:
        task = {"learning_rate": 0.1, "samples_per_epoch": 640}
        return mean_need(
            host_of(made(lambda: mlp(*widths)), native=True, **task),
            epochs=3,
            batches=10,
        )

    narrow, wide = need(2, 32), need(32, 32)
    assert (narrow > 1.5 * wide).all()


def test_a_slot_with_a_seed_that_does_not_act_yet_has_no_need() -> None:
    training = host_of(with_sources(), native=True)
    meter = NeedMeter(training)
    train_epoch(training)
    meter.measure()
    plant(training, "r2c1", "widen_half", stage=S.GERMINATED)
    meter.measure()
    by_name = dict(
        zip(training.site_by_name, meter.values.isfinite().tolist(), strict=True)
    )
    assert by_name == {"r0c0": False, "r2c0": True, "r2c1": False}


def test_a_frozen_host_is_measured_and_stays_frozen() -> None:
    config = {"freeze": "body"}
    found = []
    for native in (False, True):
        training = host_of(with_sources(), native=native, **config)
        found.append(measured(training))
        learning = [p.requires_grad for p in training.host.parameters()]
        assert sum(learning) == 2  # the head's
    assert found[0].isfinite().sum() == 2
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("task", [text(), regression()])
def test_hosts_of_other_kinds_are_measured_where_they_can_be_widened(
    task: Task,
) -> None:
    training = host_of(
        replace(task, build_host=lambda: widenable(task)), learning_rate=0.01
    )
    train_epoch(training)
    assert measured(training).isfinite().any()


def widenable(task: Task) -> Host:
    host = task.build_host()
    host.use_slots(["r2"])
    return host
