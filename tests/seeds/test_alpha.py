"""The alpha controller against the reference ramps, and its promises for any ramp."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.seeds.alpha import AlphaController, AlphaCurve

REFERENCE = {
    AlphaCurve.LINEAR: [0.2, 0.4, 0.6, 0.8, 1.0],
    AlphaCurve.COSINE: [0.0955, 0.3455, 0.6545, 0.9045, 1.0],
    AlphaCurve.LOGISTIC_12: [0.0242, 0.2301, 0.7699, 0.9758, 1.0],
}


def ramp(controller: AlphaController) -> list[float]:
    values = []
    while not controller.holding:
        controller.tick()
        values.append(controller.alpha)
    return values


@pytest.mark.parametrize("curve", REFERENCE)
def test_reference_ramps_to_one_in_five_steps(curve: AlphaCurve) -> None:
    controller = AlphaController()
    controller.retarget(1.0, 5, curve)
    assert ramp(controller) == pytest.approx(REFERENCE[curve], abs=5e-5)


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


def test_it_retargets_only_when_holding() -> None:
    controller = AlphaController()
    controller.retarget(1.0, 3, AlphaCurve.LINEAR)
    for _ in range(2):
        controller.tick()
        with pytest.raises(ValueError, match="wait until it stops"):
            controller.retarget(0.0, 1, AlphaCurve.LINEAR)
    controller.tick()
    controller.retarget(0.5, 2, AlphaCurve.LINEAR)
    assert controller.lowering
    assert ramp(controller) == pytest.approx([0.75, 0.5])


@pytest.mark.parametrize("target", [0.0, 0.5, 0.7, 1.0])
def test_zero_steps_jump(target: float) -> None:
    controller = AlphaController()
    controller.retarget(target, 0, AlphaCurve.COSINE)
    assert controller.alpha == target
    assert controller.holding
    assert controller.progress == 1.0
    controller.tick()
    assert controller.alpha == target


@pytest.mark.parametrize(("target", "steps"), [(-0.1, 1), (1.1, 1), (float("nan"), 1), (0.5, -1)])
def test_impossible_targets_are_refused(target: float, steps: int) -> None:
    controller = AlphaController()
    with pytest.raises(ValueError, match="target in"):
        controller.retarget(target, steps, AlphaCurve.LINEAR)
    assert controller == AlphaController()


@settings(deadline=None)
@given(
    start=st.floats(0, 1),
    target=st.floats(0, 1),
    steps=st.integers(0, 40),
    curve=st.sampled_from(list(AlphaCurve)),
)
def test_a_ramp_is_monotone_stays_between_its_ends_and_arrives_exactly(
    start: float, target: float, steps: int, curve: AlphaCurve
) -> None:
    controller = AlphaController(alpha=start, start=start, target=start)
    controller.retarget(target, steps, curve)
    before = start
    values = ramp(controller)
    assert len(values) == steps
    for value in values:
        assert min(start, target) <= value <= max(start, target)
        assert (value - before) * (target - start) >= 0
        before = value
    assert controller.alpha == target
