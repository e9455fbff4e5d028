"""The optimizers of host and seeds: where their state lies, and whose it is."""

from __future__ import annotations

import pytest
import torch

from esper.core.stage import SeedStage as S
from esper.ops.grad_stats import grad_stats
from esper.ops.optimizer import SGD
from esper.training.host_training import HostTraining, learning_groups
from esper.training.snapshot import Snapshot, ValidationRecord
from esper.training.step import prepare_epoch, step_groups
from tests.core_helpers import (
    digits,
    plant,
    same_bits,
    train,
    unmeasured_fossils,
)
from tests.training.byte_images import byte_digits
from tests.training.test_foreign_hosts import training_of


def momenta(training: HostTraining) -> list[torch.Tensor]:
    state = training.host_group.optimizer.state
    return [
        state[parameter]["momentum_buffer"]
        for parameter in training.host_group.parameters
    ]


@pytest.mark.parametrize("task", [digits, byte_digits])
def test_momentum_is_there_from_the_start_in_the_layout_of_the_weights(
    task: object,
) -> None:
    training = training_of(task())  # type: ignore[operator]
    plant(training, "r0c0", "conv_heavy", stage=S.TRAINING)
    for group in (training.host_group, training.seed_groups["r0c0"]):
        assert set(group.optimizer.state) == set(group.parameters)
        for parameter in group.parameters:
            buffer = group.optimizer.state[parameter]["momentum_buffer"]
            assert buffer.stride() == parameter.stride()
            assert not bool(buffer.any())
    if task is byte_digits:
        assert any(
            buffer.dim() == 4 and buffer.stride()[1] == 1
            for buffer in momenta(training)
        )
    places = [buffer.data_ptr() for buffer in momenta(training)]
    train(training, 2)
    assert [
        buffer.data_ptr() for buffer in momenta(training)
    ] == places  # a captured step finds it there
    assert all(bool(buffer.any()) for buffer in momenta(training))


@pytest.mark.trap(40)
def test_host_and_seeds_read_one_rate_on_the_device() -> None:
    training = training_of(digits())
    plant(training, "r0c0")
    plant(training, "r1c1", stage=S.HOLDING)
    groups = [training.host_group, *training.seed_groups.values()]
    assert len(groups) == 3
    for group in groups:
        assert isinstance(group.optimizer, SGD)
        (options,) = group.optimizer.param_groups
        assert options["lr"] is training.rate
    prepare_epoch(training)
    assert float(training.rate) == pytest.approx(0.05)
    train(training, 3)
    assert 0 < float(training.rate) < 0.05


@pytest.mark.trap(15)
def test_a_seed_starts_with_momentum_of_its_own() -> None:
    training = training_of(digits())
    slot = plant(training, "r0c0", stage=S.HOLDING)
    train(training, 2)
    assert all(
        state["momentum_buffer"].any()
        for state in training.seed_groups["r0c0"].optimizer.state.values()
    )
    training.remove(slot)
    plant(training, "r0c0")
    again = training.seed_groups["r0c0"].optimizer
    assert not any(
        bool(state["momentum_buffer"].any()) for state in again.state.values()
    )


# What cannot be trained is refused before any work is done


# AdamW

ADAMW = {
    "optimizer": "adamw",
    "learning_rate": 0.01,
    "weight_decay": 0.1,
    "samples_per_epoch": 64,
    "batch_size": 32,
}


def adamw() -> HostTraining:
    return training_of(digits(), task=ADAMW)


def test_a_snapshot_restores_adamw_to_the_last_bit() -> None:
    training, snapshot = adamw(), Snapshot()
    plant(training, "r0c0", stage=S.FOSSILIZED)
    train(training, 2)
    snapshot.save(
        training, ValidationRecord(1.0, 50.0, 40.0, 1.5), unmeasured_fossils(training)
    )
    good = {
        name: tensor.clone() for name, tensor in training.network_tensors(("r0c0",))
    }
    assert {"host.step.0", "host.exp_avg.0", "r0c0.exp_avg_sq.0"} <= good.keys()
    train(training)
    assert not torch.equal(
        good["host.exp_avg.0"],
        dict(training.network_tensors(("r0c0",)))["host.exp_avg.0"],
    )
    snapshot.restore(training)
    same_bits(good, dict(training.network_tensors(("r0c0",))))


def test_a_gradient_that_is_not_finite_skips_adamw_of_its_owner_only() -> None:
    training = adamw()
    plant(training, "r0c0", stage=S.HOLDING)
    prepare_epoch(training)
    before = {
        name: tensor.clone() for name, tensor in training.network_tensors(("r0c0",))
    }
    groups = learning_groups(training)
    for group in groups:
        for parameter in group.parameters:
            parameter.grad = torch.ones_like(parameter)
    groups[1].parameters[0].grad.fill_(float("nan"))  # type: ignore[union-attr]
    step_groups(
        groups, grad_stats([p.grad for p in group.parameters] for group in groups), None
    )
    changed = {
        name
        for name, tensor in training.network_tensors(("r0c0",))
        if not torch.equal(tensor, before[name])
    }
    assert changed
    assert all(name.startswith("host.") for name in changed)
    seed = training.site_by_name["r0c0"].planted
    assert seed is not None
    assert not bool(seed.finite)
