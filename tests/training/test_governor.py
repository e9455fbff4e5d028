"""The governor's rules on invented losses, in units of chance, and its snapshots on a real host."""

import math
from typing import Any

import pytest
import torch

from esper.config import Durations, TrainingConfig
from esper.core.site import Role
from esper.core.stage import SeedStage
from esper.training.governor import Governor, Panic
from esper.training.host_training import HostTraining
from esper.training.snapshot import ValidationRecord
from tests.core_helpers import (
    make_training,
    plant,
    same_bits,
    tensors_of,
    tiny_config,
    train,
    unmeasured_fossils,
)

S = SeedStage
RECORD = ValidationRecord(loss=1.0, committed=50.0, all_off=40.0, all_off_loss=1.5)


def make_governor(classes: int = 10, horizon: int = 150, **values: Any) -> Governor:
    config = TrainingConfig.parse({"governor": values})
    return Governor(config.governor, Durations.of(config, horizon), classes)


def after(governor: Governor, losses: list[float]) -> list[Panic | None]:
    """Answers to losses in units of chance."""
    return [governor.check(loss * governor.chance, 0) for loss in losses]


def reasons(answers: list[Panic | None]) -> list[str | None]:
    return [panic.reason if panic else None for panic in answers]


def test_a_healthy_descent_is_left_alone() -> None:
    governor = make_governor()
    assert (
        reasons(after(governor, [1.1, 1.0, 0.9, 0.8, 0.6, 0.5, 0.45, 0.5, 0.4, 0.3]))
        == [None] * 10
    )
    assert not governor.anomaly_pending


def test_values_that_are_not_finite_panic_in_the_first_check() -> None:
    for loss in (math.nan, math.inf, -math.inf):
        panic = make_governor().check(loss, 0)
        assert panic is not None
        assert panic.reason == "not finite"
    assert make_governor().check(0.5, 3.0) == Panic("not finite", 3.0, 0.0)


@pytest.mark.trap(13)
@pytest.mark.parametrize("classes", [2, 1000])
def test_collapse_is_judged_in_units_of_chance(classes: int) -> None:
    governor = make_governor(classes)
    assert reasons(after(governor, [0.5, 0.5, 0.934])) == [None] * 3
    governor = make_governor(classes)
    answers = after(governor, [0.5, 0.5, 0.936])
    assert reasons(answers) == [None, None, "collapse"]
    assert answers[-1] is not None
    assert answers[-1].value == pytest.approx(0.936 * math.log(classes))
    assert answers[-1].threshold == pytest.approx(0.935 * math.log(classes))


def test_divergence_requires_three_consecutive_checks() -> None:
    governor = make_governor()
    after(governor, [0.4] * 10)
    # Thresholds: mean + 6σ = 0.4, 1.5 · mean = 0.6, best + 0.25 = 0.65; collapse starts at 0.935.
    assert reasons(after(governor, [0.7, 0.7])) == [None, None]
    assert governor.anomaly_pending
    assert reasons(after(governor, [0.4])) == [None]
    assert not governor.anomaly_pending
    answers = after(governor, [0.7, 0.7, 0.7])
    assert reasons(answers) == [None, None, "divergence"]
    assert answers[-1] is not None
    assert answers[-1].threshold == pytest.approx(0.65 * math.log(10))


@pytest.mark.parametrize(
    ("history", "loss", "anomaly"),
    [
        ([0.4] * 5, 0.649, False),  # not 0.25 above the best
        ([0.4] * 5, 0.651, True),
        ([0.6] * 5, 0.89, False),  # above best + 0.25, but below 1.5 · mean = 0.9
        ([0.6] * 5, 0.91, True),
        ([0.2, 0.4] * 3, 0.89, False),  # mean 0.3, σ 0.1: mean + 6σ = 0.9
        ([0.2, 0.4] * 3, 0.91, True),
    ],
)
def test_a_loss_is_an_anomaly_above_all_three_bounds(
    history: list[float], loss: float, anomaly: bool
) -> None:
    governor = make_governor(healthy_loss=1e-6)  # no collapse in the way
    governor.losses.extend(value * governor.chance for value in history)
    after(governor, [loss])
    assert governor.anomaly_pending == anomaly


@pytest.mark.finding("L8")
def test_the_governors_window_holds_the_last_losses() -> None:
    governor = make_governor(window=3)
    after(governor, [0.9, 0.8, 0.7, 0.6])
    assert list(governor.losses) == pytest.approx(
        [value * governor.chance for value in (0.8, 0.7, 0.6)]
    )


def world(every: int = 5) -> tuple[Governor, HostTraining]:
    config = tiny_config(
        horizon=150, governor={"snapshot_every": every}, task={"schedule": "constant"}
    )
    training = make_training(config)
    governor = Governor(config.governor, training.durations, 10)
    assert snapshot_if_due(governor, training)
    return governor, training


def snapshot_if_due(
    governor: Governor, training: HostTraining, fossilized: bool = False
) -> bool:
    due = governor.snapshot_due(training.epoch, fossilized)
    if due:
        governor.take_snapshot(training, RECORD, unmeasured_fossils(training))
    return due


def poison(training: HostTraining) -> None:
    with torch.no_grad():
        for tensor in training.host.state_dict().values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))


def epoch(
    governor: Governor,
    training: HostTraining,
    loss: float = 1.0,
    fossilized: bool = False,
) -> bool:
    train(training)
    return governor.check(loss, 0) is None and snapshot_if_due(
        governor, training, fossilized
    )


@pytest.mark.finding("L5")
def test_a_snapshot_every_five_epochs_and_when_a_seed_fossilizes() -> None:
    governor, training = world()
    taken = [
        epoch(governor, training, fossilized=number == 7) for number in range(1, 14)
    ]
    assert [number for number, took in enumerate(taken, 1) if took] == [5, 7, 12]


@pytest.mark.trap(4)
def test_no_snapshot_while_an_anomaly_is_pending() -> None:
    governor, training = world(every=1)
    assert [epoch(governor, training, loss=0.9) for _ in range(3)] == [True] * 3
    good = tensors_of(training)
    assert [epoch(governor, training, loss=1.9, fossilized=True) for _ in range(2)] == [
        False
    ] * 2
    governor.roll_back(training)
    same_bits(good, tensors_of(training))


def test_a_restore_is_exact_and_so_is_training_after_it() -> None:
    governor, training = world(every=1)
    plant(training, "r0c0", stage=S.FOSSILIZED)
    epoch(governor, training)
    epoch(governor, training, fossilized=True)
    good = tensors_of(training, ("r0c0",))
    train(training)
    poison(training)
    snapshot = governor.roll_back(training)
    assert (snapshot.epoch, snapshot.record) == (2, RECORD)
    same_bits(good, tensors_of(training, ("r0c0",)))
    assert training.epoch == 3  # clocks do not rewind
    train(training)
    assert all(
        bool(torch.isfinite(tensor).all())
        for tensor in tensors_of(training, ("r0c0",)).values()
    )


@pytest.mark.trap(5)
def test_a_fossil_newer_than_the_snapshot_is_pruned_and_an_older_one_restored() -> None:
    governor, training = world()
    old = plant(training, "r0c0", stage=S.FOSSILIZED)
    train(training)
    snapshot_if_due(governor, training, fossilized=True)
    good = tensors_of(training, ("r0c0",))
    new = plant(training, "r1c1", stage=S.FOSSILIZED)
    living = plant(training, "r0c1", stage=S.HOLDING)
    train(training)
    with torch.no_grad():
        for slot in (old, new):
            assert slot.seed is not None
            for parameter in slot.seed.parameters():
                parameter.fill_(float("nan"))
    governor.roll_back(training)
    same_bits(good, tensors_of(training, ("r0c0",)))
    assert [site.role for site in (old, new, living)] == [
        Role.FOSSIL,
        Role.ABSENT,
        Role.ABSENT,
    ]
    assert [site.seed is None for site in (old, new, living)] == [False, True, True]
    assert set(training.seed_groups) == {"r0c0"}


def two_generations(
    every: int = 5,
) -> tuple[Governor, HostTraining, list[dict[str, torch.Tensor]]]:
    """Snapshots at epochs 5 and 10; the state at each."""
    governor, training = world(every)
    kept = []
    for _ in range(2):
        for _ in range(every):
            epoch(governor, training)
        kept.append(tensors_of(training))
    return governor, training, kept


@pytest.mark.parametrize(("gap", "generation"), [(1, 0), (5, 0), (6, 1)])
def test_the_older_generation_is_restored_when_the_next_panic_comes_soon(
    gap: int, generation: int
) -> None:
    governor, training, kept = two_generations()
    train(training)
    governor.roll_back(training)
    same_bits(kept[1], tensors_of(training))
    train(training, gap)  # without a check: no snapshot in between
    governor.roll_back(training)
    same_bits(kept[generation], tensors_of(training))


def test_a_fossil_that_a_fall_back_pruned_does_not_break_a_later_rollback() -> None:
    """The newer snapshot holds a fossil, the older one does not; after the fall back that fossil is gone."""
    governor, training = world()
    for _ in range(5):
        epoch(governor, training)
    fossil = plant(training, "r0c0", stage=S.FOSSILIZED)
    assert epoch(governor, training, fossilized=True)
    for _ in range(2):
        train(training)
        governor.roll_back(training)
    assert fossil.seed is None
    train(training, 6)
    governor.roll_back(training)
    assert governor.rollbacks == 3
    assert not training.seed_groups


def test_a_host_that_trains_better_than_before_does_not_diverge() -> None:
    """At the end of a fast warm-up, running statistics of batch normalisation lag behind, and validation explodes."""
    governor = make_governor()
    assert governor.chance is not None
    assert governor.check(1.0 * governor.chance, 0, 0.98 * governor.chance) is None
    for spike, train_loss in ((1.7, 0.9), (5.3, 0.8), (4.0, 0.7), (6.0, 0.65)):
        assert (
            governor.check(spike * governor.chance, 0, train_loss * governor.chance)
            is None
        )
        assert not governor.anomaly_pending
    assert (
        max(governor.losses) == governor.chance
    )  # no anomalous loss became the normal one
    answers = [
        governor.check(6.0 * governor.chance, 0, 0.7 * governor.chance)
        for _ in range(3)
    ]
    assert reasons(answers) == [None, None, "divergence"]


@pytest.mark.parametrize("train_loss", [1.01, 3.0, math.nan])
def test_a_host_that_trains_worse_than_chance_diverges(train_loss: float) -> None:
    governor = make_governor()
    assert governor.chance is not None
    answers = [
        governor.check(loss * governor.chance, 0, train_loss * governor.chance)
        for loss in (1.0, 4.0, 5.0, 6.0)
    ]
    assert reasons(answers) == [None, None, None, "divergence"]


def test_training_losses_are_part_of_the_governors_state() -> None:
    governor, again = make_governor(), make_governor()
    assert governor.chance is not None
    for loss, train_loss in ((2.0, 1.0), (1.9, 0.5)):
        governor.check(loss, 0, train_loss)
    again.load_state_dict(governor.state_dict(), torch.device("cpu"))
    answers = [
        [each.check(9.0, 0, 0.6) for _ in range(3)] for each in (governor, again)
    ]
    assert reasons(answers[0]) == reasons(answers[1]) == [None, None, "divergence"]
