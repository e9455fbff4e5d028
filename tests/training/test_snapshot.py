"""Snapshots: their content, exact repeated restores, and constant storage."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from esper.core.blueprints import BLUEPRINTS, Blueprint, BlueprintRegistry
from esper.core.stage import SeedStage
from esper.training.host_training import HostTraining
from esper.training.snapshot import (
    Snapshot,
    ValidationRecord,
)
from tests.core_helpers import (
    DAMAGE,
    make_training,
    plant,
    rig,
    same_bits,
    tensors_of,
    train,
    unmeasured_fossils,
)

S = SeedStage
RECORD = ValidationRecord(loss=1.0, committed=50.0, all_off=40.0, all_off_loss=1.5)


def with_fossil() -> HostTraining:
    training = make_training()
    plant(training, "r0c0", style="GATED_GATE", stage=S.FOSSILIZED)
    train(training, 2)
    return training


def test_a_snapshot_is_a_copy_of_that_moment() -> None:
    """The fused optimizer does not raise ``_version``: a snapshot that trusted it would keep old values."""
    training, snapshot = with_fossil(), Snapshot()
    for _ in range(3):
        snapshot.save(training, RECORD, unmeasured_fossils(training))
        good = tensors_of(training, ("r0c0",))
        train(training)
        changed = tensors_of(training, ("r0c0",))
        moved = [name for name in good if not torch.equal(good[name], changed[name])]
        assert {
            "host.parameter.0",
            "host.momentum.0",
            "r0c0.parameter.0",
            "r0c0.momentum.0",
        } <= set(moved)
        snapshot.restore(training)
        same_bits(good, tensors_of(training, ("r0c0",)))
        train(training)


def test_buffers_that_a_state_dict_leaves_out_are_restored_and_shared_parameters_copied_once() -> (
    None
):
    training, snapshot = make_training(), Snapshot()
    plain = Snapshot()
    plain.save(training, RECORD, unmeasured_fossils(training))
    training.host.register_buffer("scratch", torch.arange(5.0), persistent=False)
    training.host.register_module("again", training.host.segments[0])
    snapshot.save(training, RECORD, unmeasured_fossils(training))
    assert snapshot.held().total() == plain.held().total() + 5 * 4
    training.host.get_buffer("scratch").fill_(float("nan"))
    snapshot.restore(training)
    assert torch.equal(training.host.get_buffer("scratch"), torch.arange(5.0))


@pytest.mark.finding("H7")
def test_momentum_of_a_fossil_lives_through_a_rollback() -> None:
    """The same optimizer and storage, the values of the snapshot."""
    with rig(horizon=12, governor={"snapshot_every": 1}) as world:
        world.grow("r0c0", S.FOSSILIZED, style="GATED_GATE")
        training = world.training()
        optimizers = [
            training.host_group.optimizer,
            training.seed_groups["r0c0"].optimizer,
        ]

        def momenta() -> list[Tensor]:
            return [
                optimizer.state[p]["momentum_buffer"]
                for optimizer in optimizers
                for p in optimizer.state
            ]

        values, places = (
            [m.clone() for m in momenta()],
            [m.data_ptr() for m in momenta()],
        )
        assert len(values) == len(list(training.host.parameters())) + 8
        DAMAGE["NaN weight"](training)
        for momentum in momenta():  # a step with such weights leaves them alone
            momentum.add_(1)
        world.step()
        assert [
            training.host_group.optimizer,
            training.seed_groups["r0c0"].optimizer,
        ] == optimizers
        assert [m.data_ptr() for m in momenta()] == places
        assert all(torch.equal(a, b) for a, b in zip(values, momenta(), strict=True))


def count_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(found), Tensor) for found in gc.get_objects())


@pytest.mark.finding("C4")
def test_snapshots_live_in_the_same_storage_in_every_episode() -> None:
    """Every episode has a fossil and a rollback."""
    with rig(horizon=7, governor={"snapshot_every": 1}) as world:
        governor = world.host().governor
        places: set[tuple[int, ...]] = set()
        counts, sizes = [], []
        for episode in range(6):
            world.reset()
            world.grow("r0c0", S.FOSSILIZED, "norm")
            DAMAGE["NaN weight"](world.training())
            world.step()
            assert governor.rollbacks == 1
            kept = [s.tensors for s in governor._generations]
            places.add(
                tuple(
                    sorted(
                        c[name].data_ptr()
                        for c in kept
                        for name in c
                        if name.startswith("host.")
                    )
                )
            )
            sizes.append(governor.held().total())
            world.events.clear()
            if episode in (2, 5):
                counts.append(count_tensors())
        assert len(places) == 1
        assert len(set(sizes[1:])) == 1
        assert counts[1] <= counts[0]


def own(build: Callable[[int], nn.Module]) -> BlueprintRegistry:
    blueprint = Blueprint(
        "cnn", "own", "a test's own", build, lambda channels: 2 * channels
    )
    return BlueprintRegistry((BLUEPRINTS.get("cnn", "conv_light"), blueprint))


class Two(nn.Module):
    """Two scales; the second can be frozen, or left out of the pass."""

    def __init__(self, channels: int, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((channels, 1, 1), 0.1))
        self.second = nn.Parameter(
            torch.full((channels, 1, 1), 0.1), requires_grad=not frozen
        )
        self.both = frozen

    def forward(self, h: Tensor) -> Tensor:
        return (self.first + self.second) * h if self.both else self.first * h


@pytest.mark.trap(7)
@pytest.mark.parametrize("stage", [S.TRAINING, S.HOLDING, S.FOSSILIZED])
def test_a_parameter_whose_first_gradient_comes_late_is_optimised(
    stage: SeedStage,
) -> None:
    training = make_training()
    seed = plant(training, "r0c0", "own", stage=stage, registry=own(Two)).seed
    assert seed is not None
    assert isinstance(seed.body, Two)
    train(training)
    assert torch.equal(seed.body.second, torch.full_like(seed.body.second, 0.1))
    seed.body.both = True
    train(training)
    assert not torch.equal(seed.body.second, torch.full_like(seed.body.second, 0.1))
