"""Faults of every kind in one of two envs, each beside a run without it: the other one does not change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from esper.core.blueprints import BLUEPRINTS, Blueprint, BlueprintRegistry
from esper.core.stage import SeedStage
from esper.data.split import Split
from esper.telemetry.event import GovernorRollback, SeedCut
from esper.training.host_training import HostTraining
from tests.core_helpers import (
    DAMAGE,
    Rig,
    all_finite,
    digits,
    rig,
    same_bits,
    tensors_of,
)
from tests.selection import slow_except

S = SeedStage
NAN = float("nan")
VICTIM = 1


def state_of(training: HostTraining) -> dict[str, Tensor]:
    """Weights, buffers and momentum of host and seeds, and the generators."""
    return {
        **tensors_of(training, tuple(training.seed_groups)),
        "order": training.order.get_state(),
        "dropout": training.dropout.get_state(),
    }


@dataclass
class Pair:
    """Two runs of the same envs; one is hurt."""

    healthy: Rig
    hurt: Rig
    penalties: list[float]

    def step(self, **action: Any) -> None:
        """One step of both; ``action`` is done by every env. The other one ends it with the same bits."""
        for world in (self.healthy, self.hurt):
            row = world.action(**action) if action else None
            world.step({} if row is None else dict.fromkeys(range(2), row))
        same_bits(state_of(self.healthy.training()), state_of(self.hurt.training()))
        assert np.array_equal(self.healthy.observation[0], self.hurt.observation[0])
        assert self.healthy.rewards[0] == self.hurt.rewards[0]
        assert np.isfinite(self.hurt.observation).all()
        assert np.isfinite(self.hurt.rewards).all()
        assert all_finite(self.hurt.training(VICTIM))
        assert all(
            np.isfinite(values).all()
            for values in self.hurt.info["reward_terms"].values()
        )
        self.penalties.append(float(self.hurt.info["reward_terms"]["governor"][VICTIM]))

    @property
    def victim(self) -> HostTraining:
        return self.hurt.training(VICTIM)

    def rollbacks(self) -> list[GovernorRollback]:
        found = self.hurt.of_kind(GovernorRollback)
        assert all(event.env == VICTIM for event in found)
        assert not self.healthy.of_kind(GovernorRollback)
        return found


@contextmanager
def pair(horizon: int = 12, **sections: dict[str, Any]) -> Iterator[Pair]:
    with rig(2, horizon, **sections) as healthy, rig(2, horizon, **sections) as hurt:
        yield Pair(healthy, hurt, [])


@contextmanager
def grown_pair(
    horizon: int = 14, fossil: bool = False, **sections: dict[str, Any]
) -> Iterator[Pair]:
    """Every env has a blended seed with momentum, or a fossil, in ``r0c1``."""
    sections.setdefault("governor", {"snapshot_every": 1})
    with pair(horizon, **sections) as both:
        both.step(op="GERMINATE", slot="r0c1", blueprint="conv_light", tempo=3)
        both.step(op="ADVANCE", slot="r0c1")
        both.step(op="ADVANCE", slot="r0c1")
        if fossil:
            both.step()
            both.step(op="ADVANCE", slot="r0c1")
            both.step(op="FOSSILIZE", slot="r0c1")
        both.penalties.clear()
        yield both


def next_rows(training: HostTraining, batch: int) -> Tensor:
    """The training samples of batch number ``batch`` of the coming epoch."""
    size = training.config.task.batch_size
    assert size is not None
    order = torch.Generator()
    order.set_state(training.order.get_state())
    return torch.randperm(len(training.task.train), generator=order)[
        batch * size : (batch + 1) * size
    ]


def poison_second_batch(training: HostTraining) -> None:
    x = training.task.train.x.clone()
    x[next_rows(training, 1)[3], 0, 2, 2] = NAN
    assert training.feed is not None
    training.feed.split = Split(x, training.task.train.y)


def poison_validation(training: HostTraining) -> None:
    x = training.task.validation.x.clone()
    x[17, 0, 2, 2] = NAN
    task = copy.copy(training.task)
    object.__setattr__(
        task, "validation", Split(x, task.validation.y)
    )  # a task that is made of this is refused
    training.task = task


def overflow_in_the_forward_pass(training: HostTraining) -> None:
    """Every weight is finite; their product with the features is not."""
    with torch.no_grad():
        training.host_group.parameters[-2].fill_(3e38)


def overflow_in_evaluation(training: HostTraining) -> None:
    """All is finite, training too: its normalisation does not read the running variance."""
    norms = [m for m in training.host.modules() if isinstance(m, nn.BatchNorm2d)]
    variance = norms[-1].running_var
    assert variance is not None
    variance.fill_(-1e6)


FAULTS: dict[str, Callable[[HostTraining], None]] = {
    **DAMAGE,
    "NaN in one training batch": poison_second_batch,
    "NaN in the validation data": poison_validation,
    "overflow in the forward pass": overflow_in_the_forward_pass,
    "overflow in evaluation only": overflow_in_evaluation,
}


@pytest.mark.finding("H1")
@pytest.mark.parametrize("fossil", [False, True], ids=["living seed", "fossil"])
@pytest.mark.parametrize(
    "fault", slow_except(["NaN weight", "NaN in one training batch"], FAULTS)
)
def test_a_fault_that_is_not_finite_costs_one_rollback_and_touches_one_env(
    fault: str, fossil: bool
) -> None:
    with grown_pair(fossil=fossil) as both:
        kept = ("r0c1",) if fossil else ()
        good, at = tensors_of(both.victim, kept), both.victim.epoch
        FAULTS[fault](both.victim)
        both.step()
        (event,) = both.rollbacks()
        assert (event.reason, event.epoch, event.restored_epoch, event.rollbacks) == (
            "not finite",
            at + 1,
            at,
            1,
        )
        assert not event.value <= event.threshold  # a NaN is not, either
        same_bits(good, tensors_of(both.victim, kept))
        assert both.hurt.slot("r0c1", VICTIM).stage is (
            S.FOSSILIZED if fossil else S.PRUNED
        )
        both.victim.task = digits()  # clean again
        for _ in range(2):
            both.step()
        assert both.penalties == [-10, 0, 0]
        assert len(both.rollbacks()) == 1
        assert not both.hurt.of_kind(SeedCut)
        assert not both.hurt.terminated.any()
        restored = tensors_of(both.victim)
        assert any(
            not torch.equal(good[name], restored[name])
            for name in restored
            if "parameter" in name
        )


def test_a_fossil_that_breaks_one_epoch_after_its_fossilization_is_restored() -> None:
    """The only later snapshot than the reset's is that of the step in which it fossilized."""
    with grown_pair(fossil=True, governor={"snapshot_every": 100}) as both:
        good = tensors_of(both.victim, ("r0c1",))
        at, slot = both.victim.epoch, both.hurt.slot("r0c1", VICTIM)
        measured = slot.measured
        assert measured["contribution"] is not None
        assert slot.seed is not None
        with torch.no_grad():
            list(slot.seed.parameters())[-1].fill_(NAN)
        both.step()
        (event,) = both.rollbacks()
        assert event.restored_epoch == at
        same_bits(good, tensors_of(both.victim, ("r0c1",)))
        assert slot.stage is S.FOSSILIZED
        # What the broken epoch measured of it is gone, too.
        assert slot.measured == {
            **measured,
            "epochs_since_measured": measured["epochs_since_measured"] + 1,
        }
        both.step()
        assert both.penalties == [-10, 0]
        assert slot.epochs_since_measured == 0


def blow_up(training: HostTraining) -> None:
    """Logits a hundred times too large: a loss that is finite and far too high."""
    with torch.no_grad():
        training.host_group.parameters[-2].mul_(1e4)


@pytest.mark.finding("L5")
def test_divergence_rolls_back_to_before_its_first_anomaly() -> None:
    with grown_pair(fossil=True) as both:
        good, at = tensors_of(both.victim, ("r0c1",)), both.victim.epoch
        blow_up(both.victim)
        pending = []
        for _ in range(3):
            both.step()
            pending.append(both.hurt.value("anomaly_pending", VICTIM))
        (event,) = both.rollbacks()
        assert (event.reason, event.epoch, event.restored_epoch) == (
            "divergence",
            at + 3,
            at,
        )
        assert event.value > event.threshold > 0
        assert pending == [1, 1, 0]
        assert both.penalties == [0, 0, -10]
        same_bits(good, tensors_of(both.victim, ("r0c1",)))


@pytest.mark.trap(5)
def test_a_fossil_made_while_the_host_diverges_is_revoked() -> None:
    """Its step is the first with an anomaly, which its gate cannot have seen; no snapshot holds it."""
    with grown_pair() as both:
        both.step()
        both.step(op="ADVANCE", slot="r0c1")
        good = tensors_of(both.victim)
        blow_up(both.victim)
        both.step(op="FOSSILIZE", slot="r0c1")
        slot = both.hurt.slot("r0c1", VICTIM)
        assert slot.stage is S.FOSSILIZED
        both.step()
        both.step()
        assert len(both.rollbacks()) == 1
        assert slot.stage is S.PRUNED
        assert not both.victim.seed_groups
        same_bits(good, tensors_of(both.victim))
        assert both.healthy.slot("r0c1", VICTIM).stage is S.FOSSILIZED


class Eraser(nn.Module):
    """d(h) = −h: once it is blended in, the layers behind it see zeros."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, h: Tensor) -> Tensor:
        return -self.scale * h


@pytest.mark.parametrize("mode", ["shaped", "loss_sparse"])
def test_a_host_that_is_finite_only_with_a_living_seed_is_rolled_back(
    mode: str,
) -> None:
    """The loss with everything on is finite; that of the committed network, in rewards and snapshots, is not."""
    eraser = Blueprint(
        "cnn", "eraser", "a test's own", Eraser, lambda channels: channels
    )
    registry = BlueprintRegistry((BLUEPRINTS.get("cnn", "conv_light"), eraser))
    sections: dict[str, Any] = {
        "reward": {"mode": mode},
        "env": {"baseline_episodes": 2},
    }
    with rig(
        horizon=12, blueprints=registry, task={"learning_rate": 1e-30}, **sections
    ) as world:
        world.grow("r1c1", S.HOLDING, "eraser")
        overflow_in_the_forward_pass(world.training())
        world.step()
        assert np.isfinite(world.rewards).all()
        assert np.isfinite(world.observation).all()
        (event,) = world.of_kind(GovernorRollback)
        assert event.reason == "not finite"
        assert np.isfinite(event.value)
        assert world.slot("r1c1").seed is None


def test_a_host_that_was_never_finite_is_refused() -> None:
    """No snapshot exists that a rollback could restore."""
    with rig(n_envs=2) as world:
        poison_validation(world.training(1))
        with pytest.raises(
            ValueError, match="env 1: the host is not finite before any training"
        ):
            world.reset()


def test_a_restored_host_is_not_blamed_for_the_seed_that_it_lost() -> None:
    """With the seed the loss was low for long. Without it, it is high, stays there, and is no divergence."""
    with rig(horizon=20, governor={"snapshot_every": 1, "window": 5}) as world:
        world.grow("r0c1", S.HOLDING)
        episode, chance = world.host(), world.host().governor.chance
        world.step()
        before = world.measurement().committed_loss
        # As if the host had learned to rely on the seed.
        episode.governor.losses.extend([0.3 * chance] * 5)
        DAMAGE["NaN weight"](world.training())
        world.step()
        assert len(world.of_kind(GovernorRollback)) == 1
        assert before > 0.65 * chance
        for _ in range(5):
            world.step()
            assert world.value("anomaly_pending") == 0
        assert len(world.of_kind(GovernorRollback)) == 1


@pytest.mark.trap(8)
@pytest.mark.parametrize("removal", ["cut", "rollback"])
def test_the_cooldown_of_a_seed_that_the_governor_removed(removal: str) -> None:
    """It is as long as any other: the host trains embargo + 2 epochs without a seed in this slot."""
    with rig(horizon=14, env={"embargo": 2}) as world:
        world.grow("r0c0", S.TRAINING)
        seed = world.slot("r0c0").seed
        assert seed is not None
        if removal == "cut":
            with torch.no_grad():
                next(seed.parameters()).fill_(NAN)
        else:
            DAMAGE["NaN weight"](world.training())
        stages = []
        for _ in range(6):
            world.step()
            stages.append(world.slot("r0c0").stage)
        assert stages == [
            S.PRUNED,
            S.EMBARGOED,
            S.EMBARGOED,
            S.RESETTING,
            S.DORMANT,
            S.DORMANT,
        ]
