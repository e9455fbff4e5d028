"""Gates: the measured conditions of stage transitions. A value that was not measured fails its check.

Accuracies and contributions are in percentage points (pp). Every check is an array over envs E and slots S, so that one
definition serves masks and observations of all envs, and the explanation of a single decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.config import Durations, EnvConfig, GateConfig
from esper.lifecycle.slots import Bools, Slots
from esper.lifecycle.stage import ADVANCES, SeedStage
from esper.lifecycle.transitions import advance, cut

GATES: Mapping[SeedStage, str] = MappingProxyType(
    {SeedStage.GERMINATED: "G1", SeedStage.TRAINING: "G2", SeedStage.BLENDING: "G3", SeedStage.HOLDING: "G5"}
)
"""The gate that a seed passes next, by its stage. There is no G4.

Germination has no gate that could refuse it: the mask decides. Its event lists checks as G0, :func:`germination_gate`.
"""

Place = tuple[int, int]
Values = NDArray[Any] | float
Check = tuple[str, bool, float | None, float | None]
"""Name of a condition, whether it holds, the value (None: not measured) and its threshold."""


@dataclass(frozen=True)
class GateResult:
    """The checks of one gate for one seed."""

    gate: str
    checks: tuple[Check, ...]
    reason: str
    """Describes the failed checks; empty if the gate passed."""

    @property
    def passed(self) -> bool:
        return all(held for _, held, _, _ in self.checks)

    @property
    def score(self) -> float:
        """Fraction of the checks that hold."""
        return sum(held for _, held, _, _ in self.checks) / len(self.checks)


@dataclass(frozen=True)
class Condition:
    """One check of a gate for all seeds, [E, S] or scalar; ``value`` is NaN if it was not measured."""

    name: str
    held: Bools
    value: Values
    threshold: Values
    failure: Callable[[Place], str] | None = None
    """Describes the failure at a place; None: the value is too small."""

    def at(self, place: Place) -> tuple[Check, str]:
        """Returns the check of one seed, and what is wrong if it does not hold."""
        value, threshold = _number(self.value, place), _number(self.threshold, place)
        wrong = self.failure(place) if self.failure else _failure(self.name, value, f"at least {threshold or 0.0:g}")
        return (self.name, bool(self.held[place]), value, threshold), wrong


class Gates:
    """The checks of every gate, in the present state of ``slots``.

    Args:
        anomaly_pending: bool [E]: the governor has seen an anomaly that it has not acted on yet.
    """

    def __init__(self, slots: Slots, anomaly_pending: Bools, config: GateConfig, durations: Durations) -> None:
        self.slots = slots
        self.conditions = _conditions(slots, anomaly_pending, config, durations)

    def update(self) -> None:
        """Sets ``gate_score`` and ``gate_passed`` of the slots."""
        slots = self.slots
        score = np.zeros(slots.stage.shape)
        for stage, conditions in self.conditions.items():
            held = np.sum([condition.held for condition in conditions], axis=0)
            np.copyto(score, held / len(conditions), where=slots.stage == stage)
        slots.gate_score[...], slots.gate_passed[...] = score, score == 1.0

    def explain(self, place: Place) -> GateResult:
        """Returns the checks of the next gate of one seed. Raises KeyError for a stage without a gate."""
        stage = SeedStage(self.slots.stage[place])
        return _result(GATES[stage], [condition.at(place) for condition in self.conditions[stage]])


def _conditions(
    slots: Slots, anomaly_pending: Bools, config: GateConfig, durations: Durations
) -> dict[SeedStage, list[Condition]]:
    """Returns the checks of the gate that a seed passes next, by its stage."""
    s, epochs, alpha, strict = SeedStage, slots.epochs_in_stage, slots.alpha, config.level == "strict"
    trial = np.where(np.isnan(slots.trial_error), np.nan, slots.trial)
    tolerance = np.nan_to_num(config.trial_standard_errors * slots.trial_error)
    contribution, error = slots.contribution, slots.contribution_error
    measured = ~np.isnan(contribution) & ~np.isnan(error)
    pending = np.broadcast_to(anomaly_pending[:, None], slots.stage.shape)

    def explodes(at: Place) -> str:
        return _failure("exploding gradients", _number(slots.exploding, at), "0")

    def moves(at: Place) -> str:
        done, steps = slots.alpha_done[at], slots.alpha_steps[at]
        return f"alpha is still moving to {slots.alpha_target[at]:g}: {done} of {steps} steps done"

    conditions = {
        s.GERMINATED: [Condition("stage is GERMINATED", slots.stage == s.GERMINATED, slots.stage, float(s.GERMINATED))],
        s.TRAINING: [
            _at_least("epochs in TRAINING", epochs, durations.min_training_epochs),
            Condition("exploding gradients", slots.exploding == 0, slots.exploding, 0.0, explodes),
            _at_least("gradient health", slots.gradient_health, config.min_gradient_health),
            _at_least("trial accuracy difference", trial, 0.0 if strict else -tolerance),
        ],
        s.BLENDING: [
            _at_least("alpha target", slots.alpha_target, 1.0),
            Condition("alpha holds", slots.steady, alpha, slots.alpha_target, moves),
        ],
        s.HOLDING: [
            Condition("contribution measured", measured, contribution, 0.0, lambda _: "contribution: not measured"),
            Condition("no anomaly pending", ~pending, pending.astype(float), 0.0, lambda _: "an anomaly is pending"),
        ],
    }
    if strict:
        noise = config.contribution_standard_errors * np.nan_to_num(error)
        conditions[s.TRAINING] += [_at_least("gradient ratio", slots.gradient_ratio, config.min_gradient_ratio)]
        conditions[s.BLENDING] += [_at_least("epochs in BLENDING", epochs, durations.min_blending_epochs)]
        conditions[s.HOLDING] += [
            _at_least("contribution", contribution, least) for least in (config.min_contribution, noise)
        ]
    return conditions


def _at_least(name: str, value: NDArray[Any], threshold: Values) -> Condition:
    return Condition(name, np.asarray(value >= threshold), value, threshold)


def _failure(name: str, value: float | None, required: str) -> str:
    return f"{name}: not measured" if value is None else f"{name}: {value:g}, {required} required"


def _number(values: Values, place: Place) -> float | None:
    number = values[place].item() if isinstance(values, np.ndarray) else values
    return None if number != number else number


def germination_gate(known: bool, empty: bool, seeds_left: int) -> GateResult:
    """Evaluates G0: the blueprint is known for this topology, the slot is empty, the seed cap is not reached."""
    cap = "seeds left under the cap"
    return _result(
        "G0",
        [
            (("blueprint known", known, float(known), 1.0), "the blueprint is unknown for this topology"),
            (("slot empty", empty, float(empty), 1.0), "the slot is not empty"),
            ((cap, seeds_left >= 1, seeds_left, 1), _failure(cap, seeds_left, "at least 1")),
        ],
    )


def _result(gate: str, checks: list[tuple[Check, str]]) -> GateResult:
    """Makes the result of checks, each with what is wrong if it does not hold."""
    reason = "; ".join(wrong for (_, held, _, _), wrong in checks if not held)
    return GateResult(gate, tuple(check for check, _ in checks), reason)


def open_automatic_gates(
    gates: Gates, config: EnvConfig, durations: Durations, active: Bools
) -> list[tuple[Place, GateResult]]:
    """Advances seeds through automatic gates (``env.auto_advance``) in the envs of ``active`` bool [E].

    Seeds that fail an automatic G2 for too long are removed. Returns the gates that opened, by env and slot.
    """
    slots, automatic = gates.slots, [stage for stage in ADVANCES if GATES[stage] in config.auto_advance]
    gates.update()
    due = active[:, None] & np.isin(slots.stage, automatic) & (slots.epochs_in_stage > 0)
    stuck = (slots.stage == SeedStage.TRAINING) & (slots.epochs_in_stage >= durations.max_training_epochs)
    passed = due & slots.gate_passed
    opened = [((env, slot), gates.explain((env, slot))) for env, slot in np.argwhere(passed).tolist()]
    cut(slots, due & ~passed & stuck)
    advance(slots, passed)
    return opened
