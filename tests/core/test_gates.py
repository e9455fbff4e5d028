"""Gates: each check by itself, what was not measured, and the two levels."""

from typing import Any

import numpy as np
import pytest

from esper.config import Durations, GateConfig, TrainingConfig
from esper.core.gates import (
    GATES,
    GateResult,
    Gates,
    germination_gate,
    open_automatic_gates,
)
from esper.core.slots import Slots
from esper.core.stage import SeedStage
from tests.core.grown import made

S = SeedStage
DURATIONS = Durations.of(TrainingConfig(), 150)
PERMISSIVE, STRICT = GateConfig(), GateConfig(level="strict")
LEVELS = pytest.mark.parametrize(
    "config", [PERMISSIVE, STRICT], ids=["permissive", "strict"]
)


TRAINED: dict[str, Any] = {
    "gradient_norm": 0.5,
    "gradient_ratio": 0.10,
    "gradient_health": 0.7,
    "vanishing": 0.0,
    "exploding": 0.0,
    "trial": 0.0,
    "trial_error": 0.5,
}


HELD: dict[str, Any] = {"alpha": 1.0, "alpha_target": 1.0}


"""A ramp to the full target that has ended."""


def seed(stage: SeedStage, epochs: int, **fields: Any) -> Slots:
    return made(stage=stage, epochs_in_stage=epochs, **fields)


def answer(slots: Slots, config: GateConfig, pending: bool = False) -> GateResult:
    """The next gate of the only seed, explained; judging gives the same."""
    gates = Gates(slots, np.array([pending]), config, DURATIONS)
    result = gates.explain((0, 0))
    gates.update()
    assert slots.gate_score == result.score
    assert slots.gate_passed == result.passed == (result.score == 1.0)
    assert 0 <= result.score <= 1
    assert bool(result.reason) == (not result.passed)
    return result


@pytest.mark.parametrize(
    ("known", "empty", "left", "passed"),
    [
        (True, True, 1, True),
        (False, True, 1, False),
        (True, False, 1, False),
        (True, True, 0, False),
    ],
)
def test_g0_requires_a_blueprint_an_empty_slot_and_room(
    known: bool, empty: bool, left: int, passed: bool
) -> None:
    result = germination_gate(known, empty, left)
    assert (result.gate, result.passed) == ("G0", passed)
    assert result.score == pytest.approx(1.0 if passed else 2 / 3)


@pytest.mark.parametrize("stage", sorted(set(SeedStage) - set(GATES)))
def test_a_stage_without_a_gate_has_no_score_and_no_explanation(
    stage: SeedStage,
) -> None:
    slots = made(stage=stage, gate_score=1.0, gate_passed=True)
    gates = Gates(slots, np.array([False]), PERMISSIVE, DURATIONS)
    gates.update()
    assert slots.gate_score == 0
    assert not slots.gate_passed
    with pytest.raises(KeyError):
        gates.explain((0, 0))


@LEVELS
def test_g2_passes_exactly_at_its_thresholds(config: GateConfig) -> None:
    result = answer(seed(S.TRAINING, 10, **TRAINED), config)
    assert result.gate == "G2"
    assert result.passed, result.reason


@LEVELS
@pytest.mark.parametrize(
    ("name", "value"),
    [("gradient_health", 0.69), ("exploding", 0.01), ("trial", -0.51)],
)
def test_g2_fails_on_each_check_alone(
    config: GateConfig, name: str, value: float
) -> None:
    result = answer(seed(S.TRAINING, 10, **{**TRAINED, name: value}), config)
    assert sum(not held for _, held, _, _ in result.checks) == 1


@LEVELS
@pytest.mark.parametrize(
    "name", ["gradient_health", "exploding", "trial", "trial_error"]
)
def test_g2_not_measured_is_not_passed(config: GateConfig, name: str) -> None:
    result = answer(seed(S.TRAINING, 10, **{**TRAINED, name: None}), config)
    assert not result.passed
    assert "not measured" in result.reason


def test_g2_permissive_tolerates_one_standard_error_and_strict_none() -> None:
    slightly_worse = seed(S.TRAINING, 10, **{**TRAINED, "trial": -0.5})
    assert answer(slightly_worse, PERMISSIVE).passed
    assert not answer(slightly_worse, STRICT).passed


@pytest.mark.parametrize("ratio", [0.099, None])
def test_g2_strict_requires_the_gradient_ratio(ratio: float | None) -> None:
    slots = seed(S.TRAINING, 10, **{**TRAINED, "gradient_ratio": ratio})
    assert answer(slots, PERMISSIVE).passed
    assert not answer(slots, STRICT).passed


@LEVELS
def test_g3_requires_alpha_at_a_full_target(config: GateConfig) -> None:
    assert answer(seed(S.BLENDING, 10, **HELD), config).passed
    assert not answer(seed(S.BLENDING, 10, alpha=0.7, alpha_target=0.7), config).passed
    under_way = answer(seed(S.BLENDING, 10, alpha_target=1.0, alpha_steps=3), config)
    assert [name for name, held, _, _ in under_way.checks if not held] == [
        "alpha holds"
    ]
    assert not answer(seed(S.BLENDING, 10), config).passed


def test_g3_strict_requires_ten_epochs_of_blending() -> None:
    early = seed(S.BLENDING, 9, **HELD)
    assert answer(early, PERMISSIVE).passed
    assert not answer(early, STRICT).passed


@LEVELS
def test_g5_requires_a_measured_contribution_and_no_pending_anomaly(
    config: GateConfig,
) -> None:
    good = seed(S.HOLDING, 1, **HELD, contribution=2.0, contribution_error=1.0)
    assert answer(good, config).passed
    assert not answer(good, config, pending=True).passed
    incomplete: list[dict[str, Any]] = [
        {},
        {"contribution": 2.0},
        {"contribution_error": 1.0},
    ]
    for missing in incomplete:
        assert not answer(seed(S.HOLDING, 1, **HELD, **missing), config).passed


@pytest.mark.parametrize(
    ("contribution", "error", "strict"),
    [(1.0, 0.5, True), (0.9, 0.1, False), (2.0, 1.25, False), (-1.0, 0.1, False)],
)
def test_g5_strict_requires_one_point_above_the_noise(
    contribution: float, error: float, strict: bool
) -> None:
    slots = seed(
        S.HOLDING, 1, **HELD, contribution=contribution, contribution_error=error
    )
    assert answer(slots, PERMISSIVE).passed
    assert answer(slots, STRICT).passed == strict


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (
            germination_gate(False, True, 1),
            "the blueprint is unknown for this topology",
        ),
        (
            germination_gate(True, False, 0),
            "the slot is not empty; seeds left under the cap: 0, at least 1 required",
        ),
        (
            answer(
                seed(S.BLENDING, 10, alpha=1.0, alpha_target=1.0, alpha_steps=3),
                PERMISSIVE,
            ),
            "alpha is still moving to 1: 0 of 3 steps done",
        ),
        (
            answer(seed(S.TRAINING, 3, **{**TRAINED, "exploding": 0.5}), PERMISSIVE),
            "epochs in TRAINING: 3, at least 10 required; exploding gradients: 0.5, 0 required",
        ),
        (
            answer(seed(S.HOLDING, 1), PERMISSIVE, pending=True),
            "contribution: not measured; an anomaly is pending",
        ),
    ],
)
def test_a_refusal_says_what_is_missing(result: GateResult, reason: str) -> None:
    assert result.reason == reason


def test_a_value_that_was_not_measured_is_none_in_a_check() -> None:
    result = answer(
        seed(S.TRAINING, 10, **{**TRAINED, "exploding": None, "trial_error": None}),
        PERMISSIVE,
    )
    values = {name: value for name, _, value, _ in result.checks}
    assert values["exploding gradients"] is None
    assert values["trial accuracy difference"] is None
    assert values["gradient health"] == 0.7
    assert (
        result.reason
        == "exploding gradients: not measured; trial accuracy difference: not measured"
    )


@LEVELS
def test_seeds_are_judged_side_by_side_as_they_are_alone(config: GateConfig) -> None:
    """Seeds of several envs, at all stages; an anomaly that is pending counts in its own env only."""
    stages = np.array([sorted(SeedStage)] * 4)
    slots = made(
        4,
        len(SeedStage),
        stage=stages,
        epochs_in_stage=10,
        **TRAINED,
        **HELD,
        contribution=2.0,
    )
    slots.contribution_error[...] = np.array([[0.5], [np.nan], [0.5], [0.5]])
    slots.gradient_health[2] = np.nan
    pending = np.array([False, False, False, True])
    Gates(slots, pending, config, DURATIONS).update()
    for env, place in np.ndindex(*stages.shape):
        alone = Slots.fresh(1, 1)
        for name, values in slots.arrays().items():
            alone.arrays()[name][...] = values[env, place]
        Gates(alone, pending[[env]], config, DURATIONS).update()
        assert alone.gate_score == slots.gate_score[env, place]
        assert alone.gate_passed == slots.gate_passed[env, place]
    holding = stages[0].tolist().index(S.HOLDING)
    assert slots.gate_passed[:, holding].tolist() == [True, False, True, False]
    assert slots.gate_passed[:, stages[0].tolist().index(S.TRAINING)].tolist() == [
        True,
        True,
        False,
        True,
    ]


def test_automatic_gates_open_where_they_are_passed_and_remove_seeds_that_are_stuck() -> (
    None
):
    """G2 only: seeds that pass it advance, seeds at the limit that do not are removed, all others stay."""
    config = TrainingConfig.parse(
        {"env": {"auto_advance": ["G2"], "gates": {"min_training_epochs": 1}}}
    ).env
    epochs = np.array(
        [[0, 10, 10, DURATIONS.max_training_epochs, DURATIONS.max_training_epochs, 10]]
        * 2
    )
    slots = made(
        2,
        6,
        stage=S.TRAINING,
        epochs_in_stage=epochs,
        **TRAINED,
        tempo=3,
        incubation_target=1.0,
    )
    slots.trial[:, [2, 3]] = -9.0
    slots.stage[:, 5] = S.GERMINATED
    opened = open_automatic_gates(
        Gates(slots, np.zeros(2, dtype=np.bool_), config.gates, DURATIONS),
        config,
        DURATIONS,
        np.array([True, False]),
    )
    assert [place for place, _ in opened] == [(0, 1), (0, 4)]
    assert [(result.gate, result.passed) for _, result in opened] == [("G2", True)] * 2
    assert slots.stage[0].tolist() == [
        S.TRAINING,
        S.BLENDING,
        S.TRAINING,
        S.PRUNED,
        S.BLENDING,
        S.GERMINATED,
    ]
    assert slots.stage[1].tolist() == [S.TRAINING] * 5 + [S.GERMINATED]
    assert slots.alpha[0].tolist() == pytest.approx([0, 1 / 3, 0, 0, 1 / 3, 0])
