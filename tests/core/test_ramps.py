"""Ramps of alpha against the reference ramps, and their properties for any start and target."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.core import action, transitions
from esper.core.ramps import MAX_STEPS, PROGRESS, STYLES, AlphaCurve
from esper.core.slots import Slots
from esper.core.stage import SeedStage
from tests.core.grown import LINEAR, made, set_target, tick

S = SeedStage
CURVES = [AlphaCurve(name) for name in action.ALPHA_CURVES]
REFERENCE = {
    AlphaCurve.LINEAR: [0.2, 0.4, 0.6, 0.8, 1.0],
    AlphaCurve.COSINE: [0.0955, 0.3455, 0.6545, 0.9045, 1.0],
    AlphaCurve.LOGISTIC_12: [0.0242, 0.2301, 0.7699, 0.9758, 1.0],
}


def blending(alpha: float = 0.0, envs: int = 1, places: int = 1) -> Slots:
    """Seeds in BLENDING whose alpha holds."""
    held = dict.fromkeys(
        ("alpha", "alpha_start", "alpha_target", "alpha_at_tick"), alpha
    )
    return made(envs, places, stage=S.BLENDING, blueprint=0, **held)


def ramp(slots: Slots, target: float, steps: int, curve: AlphaCurve) -> list[float]:
    """Alpha in every epoch of a new ramp; entering it takes the first step."""
    set_target(slots, target, steps, CURVES.index(curve))
    values = [slots.alpha.item()] if steps else []
    while not slots.steady.all():
        tick(slots)
        values.append(slots.alpha.item())
    return values


@pytest.mark.parametrize("curve", REFERENCE)
def test_reference_ramps_to_one_in_five_steps(curve: AlphaCurve) -> None:
    assert ramp(blending(), 1.0, 5, curve) == pytest.approx(REFERENCE[curve], abs=5e-5)
    assert PROGRESS[CURVES.index(curve), 5, 1:6] == pytest.approx(
        REFERENCE[curve], abs=5e-5
    )


@pytest.mark.parametrize("curve", list(AlphaCurve))
def test_curves_run_from_zero_to_one_and_are_symmetric(curve: AlphaCurve) -> None:
    assert curve.at(0.0) == pytest.approx(0.0, abs=1e-15)
    assert curve.at(1.0) == pytest.approx(1.0, abs=1e-15)
    assert curve.at(0.5) == pytest.approx(0.5, abs=1e-12)
    assert curve.at(0.3) + curve.at(0.7) == pytest.approx(1.0, abs=1e-12)


def test_steeper_logistics_start_later() -> None:
    curves = [AlphaCurve.LOGISTIC_6, AlphaCurve.LOGISTIC_12, AlphaCurve.LOGISTIC_24]
    early = [curve.at(0.2) for curve in curves]
    assert early == sorted(early, reverse=True)
    # k = 6 at t = 0.2: (1/(1 + e^1.8) - 1/(1 + e^3)) / (1/(1 + e^-3) - 1/(1 + e^3))
    assert early[0] == pytest.approx(0.10432, abs=1e-5)


def test_the_table_of_progress_covers_every_curve_and_length() -> None:
    assert PROGRESS.shape == (len(AlphaCurve), MAX_STEPS + 1, MAX_STEPS + 1)
    assert max(*action.TEMPOS, *action.ALPHA_SPEEDS) == MAX_STEPS
    for c, curve in enumerate(CURVES):
        for steps in range(1, MAX_STEPS + 1):
            row = PROGRESS[c, steps]
            assert row[: steps + 1].tolist() == [
                curve.at(done / steps) for done in range(steps + 1)
            ]
    assert [CURVES.index(style.curve) for style in STYLES.values()] == [
        0,
        0,
        CURVES.index(AlphaCurve.LOGISTIC_12),
        0,
    ]


def test_velocity_is_the_change_between_two_ticks_by_the_ramp_or_by_a_jump() -> None:
    slots = blending()
    set_target(slots, 1.0, 4)
    tick(slots)
    assert slots.alpha_velocity == pytest.approx(
        0.5
    )  # the step on entering and the one of the tick
    tick(slots)
    assert slots.alpha_velocity == pytest.approx(0.25)
    tick(slots)
    set_target(slots, 0.5, 0)
    tick(slots)
    assert slots.alpha_velocity == pytest.approx(-0.5)
    tick(slots)
    assert slots.alpha_velocity == 0


@settings(deadline=None)
@given(
    start=st.floats(0, 1),
    target=st.floats(0, 1),
    steps=st.integers(0, MAX_STEPS),
    curve=st.sampled_from(list(AlphaCurve)),
)
def test_a_ramp_is_monotone_stays_between_its_ends_and_arrives_exactly(
    start: float, target: float, steps: int, curve: AlphaCurve
) -> None:
    slots = blending(start)
    before = start
    values = ramp(slots, target, steps, curve)
    assert len(values) == steps
    for value in values:
        assert min(start, target) <= value <= max(start, target)
        assert (value - before) * (target - start) >= 0
        before = value
    assert slots.alpha == target


def test_ramps_side_by_side_do_not_touch_each_other() -> None:
    """Every target, length and curve at once gives what each gives alone; a slot that is not selected stays."""
    targets, steps = np.array([[0.25], [1.0]]), np.array([[2, 3, 0]])
    slots = blending(0.5, envs=2, places=3)
    ticked = np.ones((2, 3), dtype=np.bool_)
    ticked[1, 2] = False
    from_table = [(t, s) for t in targets[:, 0] for s in steps[0]]
    alone = [blending(0.5) for _ in from_table]
    for each, (target, count) in zip(alone, from_table, strict=True):
        set_target(each, target, count)
    transitions.set_alpha_target(slots, ticked, targets, steps, np.array([[LINEAR]]))
    for _ in range(2):
        expected = np.array([each.alpha.item() for each in alone]).reshape(2, 3)
        assert (
            np.where(ticked, slots.alpha, 0.5).tolist()
            == np.where(ticked, expected, 0.5).tolist()
        )
        assert slots.alpha[1, 2] == 0.5
        transitions.tick(slots, ticked, 5)
        for each in alone:
            tick(each)
    assert slots.steady.all()
