"""Gates: each check by itself, what was not measured, and the two levels."""

from dataclasses import replace
from typing import Any

import pytest

from esper.config import Durations, GateConfig, TrainingConfig
from esper.lifecycle.stage import SeedStage
from esper.seeds.alpha import AlphaController, AlphaCurve
from esper.seeds.gate import GateEvidence, GateResult, SeedMeasurements, evaluate_gate, germination_gate

S = SeedStage
DURATIONS = Durations.of(TrainingConfig(), 150)
PERMISSIVE, STRICT = GateConfig(), GateConfig(level="strict")
LEVELS = pytest.mark.parametrize("config", [PERMISSIVE, STRICT], ids=["permissive", "strict"])

TRAINED: dict[str, Any] = {
    "gradient_norm": 0.5,
    "gradient_ratio": 0.10,
    "gradient_health": 0.7,
    "vanishing": 0.0,
    "exploding": 0.0,
    "trial": 0.0,
    "trial_error": 0.5,
}


def evidence(
    stage: SeedStage, epochs: int, alpha: AlphaController | None = None, pending: bool = False, **measured: Any
) -> GateEvidence:
    return GateEvidence(stage, epochs, alpha or AlphaController(), SeedMeasurements(**measured), pending)


def answer(target: SeedStage, given: GateEvidence, config: GateConfig) -> GateResult:
    result = evaluate_gate(target, given, config, DURATIONS)
    assert result.passed == (result.score == 1.0)
    assert 0 <= result.score <= 1
    assert bool(result.reason) == (not result.passed)
    return result


def at(alpha: float, target: float, steps: int = 0) -> AlphaController:
    controller = AlphaController(alpha=alpha, start=alpha, target=alpha)
    controller.retarget(target, steps, AlphaCurve.LINEAR)
    return controller


@pytest.mark.parametrize(
    ("horizon", "expected"),
    [
        (150, (10, 10, 5, 5, 30, 10, 5, 20)),
        (30, (2, 2, 1, 1, 6, 2, 1, 5)),
        (75, (5, 5, 3, 3, 15, 5, 3, 10)),
        (1, (2, 2, 1, 1, 4, 2, 1, 5)),
    ],
)
def test_durations_scale_with_the_horizon_rounded_up(horizon: int, expected: tuple[int, ...]) -> None:
    d = Durations.of(TrainingConfig(), horizon)
    assert (
        d.min_training_epochs,
        d.min_blending_epochs,
        d.min_prune_age,
        d.embargo,
        d.max_training_epochs,
        d.dwell,
        d.snapshot_every,
        d.governor_window,
    ) == expected


@pytest.mark.parametrize(
    ("known", "empty", "left", "passed"),
    [(True, True, 1, True), (False, True, 1, False), (True, False, 1, False), (True, True, 0, False)],
)
def test_g0_wants_a_known_blueprint_an_empty_slot_and_room(known: bool, empty: bool, left: int, passed: bool) -> None:
    result = germination_gate(known, empty, left)
    assert (result.gate, result.passed) == ("G0", passed)
    assert result.score == pytest.approx(1.0 if passed else 2 / 3)


@LEVELS
def test_g1_wants_a_germinated_seed(config: GateConfig) -> None:
    assert answer(S.TRAINING, evidence(S.GERMINATED, 0), config).passed
    assert not answer(S.TRAINING, evidence(S.TRAINING, 9), config).passed


@LEVELS
def test_g2_passes_exactly_at_its_thresholds(config: GateConfig) -> None:
    result = answer(S.BLENDING, evidence(S.TRAINING, 10, **TRAINED), config)
    assert result.gate == "G2"
    assert result.passed, result.reason


@LEVELS
@pytest.mark.parametrize(
    ("name", "value"),
    [("gradient_health", 0.69), ("exploding", 0.01), ("trial", -0.51)],
)
def test_g2_fails_on_each_check_alone(config: GateConfig, name: str, value: float) -> None:
    result = answer(S.BLENDING, evidence(S.TRAINING, 10, **{**TRAINED, name: value}), config)
    assert sum(not check.held for check in result.checks) == 1


@LEVELS
def test_g2_wants_ten_epochs_of_training(config: GateConfig) -> None:
    assert not answer(S.BLENDING, evidence(S.TRAINING, 9, **TRAINED), config).passed


@LEVELS
@pytest.mark.parametrize("name", ["gradient_health", "exploding", "trial", "trial_error"])
def test_g2_not_measured_is_not_passed(config: GateConfig, name: str) -> None:
    result = answer(S.BLENDING, evidence(S.TRAINING, 10, **{**TRAINED, name: None}), config)
    assert not result.passed
    assert "not measured" in result.reason


def test_g2_permissive_tolerates_one_standard_error_and_strict_none() -> None:
    slightly_worse = evidence(S.TRAINING, 10, **{**TRAINED, "trial": -0.5})
    assert answer(S.BLENDING, slightly_worse, PERMISSIVE).passed
    assert not answer(S.BLENDING, slightly_worse, STRICT).passed


@pytest.mark.parametrize("ratio", [0.099, None])
def test_g2_strict_asks_for_the_gradient_ratio(ratio: float | None) -> None:
    given = evidence(S.TRAINING, 10, **{**TRAINED, "gradient_ratio": ratio})
    assert answer(S.BLENDING, given, PERMISSIVE).passed
    assert not answer(S.BLENDING, given, STRICT).passed


@LEVELS
def test_g3_wants_alpha_at_a_full_target(config: GateConfig) -> None:
    assert answer(S.HOLDING, evidence(S.BLENDING, 10, at(0.0, 1.0)), config).passed
    assert not answer(S.HOLDING, evidence(S.BLENDING, 10, at(0.0, 0.7)), config).passed
    under_way = answer(S.HOLDING, evidence(S.BLENDING, 10, at(0.0, 1.0, steps=3)), config)
    assert [check.name for check in under_way.checks if not check.held] == ["alpha holds"]
    assert not answer(S.HOLDING, evidence(S.BLENDING, 10), config).passed


def test_g3_strict_wants_ten_epochs_of_blending() -> None:
    early = evidence(S.BLENDING, 9, at(0.0, 1.0))
    assert answer(S.HOLDING, early, PERMISSIVE).passed
    assert not answer(S.HOLDING, early, STRICT).passed


@LEVELS
def test_g5_wants_a_measured_contribution_and_a_quiet_governor(config: GateConfig) -> None:
    good = evidence(S.HOLDING, 1, at(0.0, 1.0), contribution=2.0, contribution_error=1.0)
    assert answer(S.FOSSILIZED, good, config).passed
    assert not answer(S.FOSSILIZED, replace(good, anomaly_pending=True), config).passed
    incomplete: list[dict[str, Any]] = [{}, {"contribution": 2.0}, {"contribution_error": 1.0}]
    for missing in incomplete:
        assert not answer(S.FOSSILIZED, evidence(S.HOLDING, 1, at(0.0, 1.0), **missing), config).passed


@pytest.mark.parametrize(
    ("contribution", "error", "strict"), [(1.0, 0.5, True), (0.9, 0.1, False), (2.0, 1.25, False), (-1.0, 0.1, False)]
)
def test_g5_strict_wants_one_point_above_the_noise(contribution: float, error: float, strict: bool) -> None:
    given = evidence(S.HOLDING, 1, at(0.0, 1.0), contribution=contribution, contribution_error=error)
    assert answer(S.FOSSILIZED, given, PERMISSIVE).passed
    assert answer(S.FOSSILIZED, given, STRICT).passed == strict


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (germination_gate(False, True, 1), "the blueprint is unknown for this topology"),
        (germination_gate(True, False, 0), "the slot is not empty; seeds left under the cap: 0, at least 1 required"),
        (
            answer(S.HOLDING, evidence(S.BLENDING, 10, at(1.0, 1.0, steps=3)), PERMISSIVE),
            "alpha is still moving to 1: 0 of 3 steps done",
        ),
        (
            answer(S.BLENDING, evidence(S.TRAINING, 3, **{**TRAINED, "exploding": 0.5}), PERMISSIVE),
            "epochs in TRAINING: 3, at least 10 required; exploding gradients: 0.5, 0 required",
        ),
        (
            answer(S.FOSSILIZED, evidence(S.HOLDING, 1, pending=True), PERMISSIVE),
            "contribution: not measured; an anomaly is pending",
        ),
    ],
)
def test_a_refusal_says_what_is_missing(result: GateResult, reason: str) -> None:
    assert result.reason == reason
