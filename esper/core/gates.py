"""Gates: the measured conditions of stage transitions. A value that was not measured fails its check.

Accuracies and contributions are in percentage points (pp). Every check is an array over envs E and slots S, so that one
definition serves masks and observations of all envs, and the explanation of a single decision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.config import Durations, EnvConfig, GateConfig
from esper.core.slots import Bools, Slots
from esper.core.stage import ADVANCES, SeedStage
from esper.core.transitions import advance, cut

GATES: Mapping[SeedStage, str] = {
    SeedStage.GERMINATED: "G1",
    SeedStage.TRAINING: "G2",
    SeedStage.BLENDING: "G3",
    SeedStage.HOLDING: "G5",
}
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
    unit: str = ""
    failure: Callable[[Place], str] | None = None
    """Describes the failure at a place; None: the value is too small."""

    def at(self, place: Place) -> tuple[Check, str]:
        """Returns the check of one seed, and what is wrong if it does not hold."""
        value = _number(self.value, place)
        threshold = _number(self.threshold, place)
        check = (self.name, bool(self.held[place]), value, threshold)

        if self.failure is not None:
            return check, self.failure(place)
        return check, _failure(self.name, value, f"at least {threshold or 0.0:g}{self.unit}", self.unit)


class Gates:
    """The checks of every gate, in the present state of ``slots``.

    Args:
        anomaly_pending: bool [E]: the governor has seen an anomaly that it has not acted on yet.
    """

    def __init__(
        self,
        slots: Slots,
        anomaly_pending: Bools,
        config: GateConfig,
        durations: Durations,
    ) -> None:
        self.slots = slots
        self.conditions = _conditions(slots, anomaly_pending, config, durations)

    def update(self) -> None:
        """Sets ``gate_score`` and ``gate_passed`` of the slots."""
        slots = self.slots
        score = np.zeros(slots.stage.shape)
        for stage, conditions in self.conditions.items():
            # Number of conditions that hold, [E, S].
            held = np.sum([condition.held for condition in conditions], axis=0)
            np.copyto(score, held / len(conditions), where=slots.stage == stage)
        slots.gate_score[...] = score
        slots.gate_passed[...] = score == 1.0

    def explain(self, place: Place) -> GateResult:
        """Returns the checks of the next gate of one seed. Raises KeyError for a stage without a gate."""
        stage = SeedStage(self.slots.stage[place])
        checks = [condition.at(place) for condition in self.conditions[stage]]
        return _result(GATES[stage], checks)


def _conditions(
    slots: Slots,
    anomaly_pending: Bools,
    config: GateConfig,
    durations: Durations,
) -> dict[SeedStage, list[Condition]]:
    """Returns the checks of the gate that a seed passes next, by its stage."""
    germinated = Condition(
        "stage is GERMINATED",
        slots.stage == SeedStage.GERMINATED,
        slots.stage,
        float(SeedStage.GERMINATED),
    )
    return {
        SeedStage.GERMINATED: [germinated],
        SeedStage.TRAINING: _training_conditions(slots, config, durations),
        SeedStage.BLENDING: _blending_conditions(slots, config, durations),
        SeedStage.HOLDING: _holding_conditions(slots, anomaly_pending, config),
    }


def _training_conditions(
    slots: Slots,
    config: GateConfig,
    durations: Durations,
) -> list[Condition]:
    """Returns the checks of G2."""

    def explodes(at: Place) -> str:
        return _failure("exploding gradients", _number(slots.exploding, at), "0")

    # A trial without an error was not measured.
    trial = np.where(np.isnan(slots.trial_error), np.nan, slots.trial)
    strict = config.level == "strict"
    # A difference within the error of its measurement may be chance.
    min_trial: Values = 0.0
    if not strict:
        min_trial = -np.nan_to_num(config.trial_standard_errors * slots.trial_error)

    conditions = [
        _at_least("epochs in TRAINING", slots.epochs_in_stage, durations.min_training_epochs),
        Condition("exploding gradients", slots.exploding == 0, slots.exploding, 0.0, failure=explodes),
        _at_least("gradient health", slots.gradient_health, config.min_gradient_health),
        _at_least("trial accuracy difference", trial, min_trial, " pp"),
    ]
    if strict:
        conditions.append(_at_least("gradient ratio", slots.gradient_ratio, config.min_gradient_ratio))
    return conditions


def _blending_conditions(
    slots: Slots,
    config: GateConfig,
    durations: Durations,
) -> list[Condition]:
    """Returns the checks of G3."""

    def moves(at: Place) -> str:
        done = slots.alpha_done[at]
        steps = slots.alpha_steps[at]
        return f"alpha is still moving to {slots.alpha_target[at]:g}: {done} of {steps} steps done"

    conditions = [
        _at_least("alpha target", slots.alpha_target, 1.0),
        Condition("alpha holds", slots.steady, slots.alpha, slots.alpha_target, failure=moves),
    ]
    if config.level == "strict":
        conditions.append(_at_least("epochs in BLENDING", slots.epochs_in_stage, durations.min_blending_epochs))
    return conditions


def _holding_conditions(
    slots: Slots,
    anomaly_pending: Bools,
    config: GateConfig,
) -> list[Condition]:
    """Returns the checks of G5."""
    contribution = slots.contribution
    error = slots.contribution_error
    # A contribution without an error was not measured either.
    measured = ~np.isnan(contribution) & ~np.isnan(error)
    pending = np.broadcast_to(anomaly_pending[:, None], slots.stage.shape)

    conditions = [
        Condition(
            "contribution measured",
            measured,
            contribution,
            0.0,
            failure=lambda _: "contribution: not measured",
        ),
        Condition(
            "no anomaly pending",
            ~pending,
            pending.astype(float),
            0.0,
            failure=lambda _: "an anomaly is pending",
        ),
    ]
    if config.level == "strict":
        noise = config.contribution_standard_errors * np.nan_to_num(error)
        conditions += [
            _at_least("contribution", contribution, config.min_contribution, " pp"),
            _at_least("contribution", contribution, noise, " pp"),
        ]
    return conditions


def _at_least(
    name: str,
    value: NDArray[Any],
    threshold: Values,
    unit: str = "",
) -> Condition:
    return Condition(name, value >= threshold, value, threshold, unit)


def _failure(name: str, value: float | None, required: str, unit: str = "") -> str:
    if value is None:
        return f"{name}: not measured"
    return f"{name}: {value:g}{unit}, {required} required"


def _number(values: Values, place: Place) -> float | None:
    """Returns the value at a place; None if it was not measured."""
    number = values[place].item() if isinstance(values, np.ndarray) else values
    return None if math.isnan(number) else number


def germination_gate(
    known: bool,
    empty: bool,
    seeds_left: int,
) -> GateResult:
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
    gates: Gates,
    config: EnvConfig,
    durations: Durations,
    active: Bools,
) -> list[tuple[Place, GateResult]]:
    """Advances seeds through automatic gates (``env.auto_advance``) in the envs of ``active`` bool [E].

    Seeds that fail an automatic G2 for too long are removed. Returns the gates that opened, by env and slot.
    """
    slots = gates.slots
    automatic = [stage for stage in ADVANCES if GATES[stage] in config.auto_advance]
    gates.update()
    # A seed stays in a stage for at least one epoch.
    due = active[:, None] & np.isin(slots.stage, automatic) & (slots.epochs_in_stage > 0)
    passed = due & slots.gate_passed
    stuck = (slots.stage == SeedStage.TRAINING) & (slots.epochs_in_stage >= durations.max_training_epochs)

    # The checks are those of the stage that a seed leaves, so they are read before it does.
    opened = []
    for env, slot in np.argwhere(passed).tolist():
        place = (env, slot)
        opened.append((place, gates.explain(place)))
    cut(slots, due & ~passed & stuck)
    advance(slots, passed)
    return opened
