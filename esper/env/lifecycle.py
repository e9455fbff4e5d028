"""The lifecycle of seeds in arrays: the operations of ``SeedSlot`` for the slots of many envs at once.

``where`` is always bool [E, S] and selects the slots of a change, which the action mask has allowed before. Values are
[E, S], or [E, 1] for one value per env. A test drives both implementations with the same actions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from esper.env.fleet import FLOAT, HAS_SEED, INT, IS_BLENDED, IS_COOLING, Bools, Floats, Ints, Rules, Slots
from esper.seeds.alpha import AlphaCurve
from esper.seeds.blend import STYLES, BlendOperator
from esper.seeds.gate import GATES
from esper.seeds.stage import ADVANCES, COOLDOWN, TRANSITIONS, SeedStage
from esper.spaces import action

_CURVES = [AlphaCurve(name) for name in action.ALPHA_CURVES]
_STYLES = [STYLES[name] for name in action.STYLES]
STYLE_CURVE: Ints = np.array([_CURVES.index(style.curve) for style in _STYLES])
"""Curve of the first ramp, by style."""
STYLE_OPERATOR: Ints = np.array([list(BlendOperator).index(style.operator) for style in _STYLES])
STYLE_IS_GATED: Bools = np.array([style.operator is BlendOperator.GATE for style in _STYLES])

LONGEST = max(*action.TEMPOS, *action.ALPHA_SPEEDS)


def _ramp_table() -> Floats:
    """Returns the progress of ramps, [curves, steps, done]."""
    table = np.zeros((len(_CURVES), LONGEST + 1, LONGEST + 1))
    for c, curve in enumerate(_CURVES):
        for steps in range(1, LONGEST + 1):
            for done in range(steps + 1):
                table[c, steps, done] = curve.at(done / steps)
    return table


def _following(after: dict[SeedStage, SeedStage]) -> Ints:
    """Returns the next stage, indexed by a stage's value; the stage itself if it has none."""
    table = np.arange(max(SeedStage) + 1)
    table[list(after)] = list(after.values())
    return table


_RAMPS = _ramp_table()
_ADVANCED = _following(dict(ADVANCES))
_COOLED = _following({stage: next(iter(TRANSITIONS[stage])) for stage in COOLDOWN})


@dataclass
class SeedSlots(Slots):
    """Slots with the additional state of simulated seeds, [E, S]."""

    style: Ints = field(metadata=INT)
    tempo: Ints = field(metadata=INT)
    alpha_curve: Ints = field(metadata=INT)
    alpha_at_tick: Floats = field(metadata=FLOAT)

    @property
    def lowering(self) -> Bools:
        return np.asarray(~self.holding & (self.alpha_target < self.alpha_start))

    @property
    def learning(self) -> Bools:
        """True for seeds that train: not in GERMINATED, and not while alpha is falling."""
        return np.asarray(HAS_SEED[self.stage] & (self.stage != SeedStage.GERMINATED) & ~self.lowering)


def germinate(
    slots: SeedSlots, where: Bools, blueprint: Ints, style: Ints, tempo: Ints, target: Floats, parameters: Ints
) -> None:
    slots.clear(where)
    for values, new in (
        (slots.blueprint, blueprint),
        (slots.style, style),
        (slots.tempo, tempo),
        (slots.incubation_target, target),
        (slots.parameters, parameters),
    ):
        np.copyto(values, new, where=where)
    _enter(slots, where, SeedStage.GERMINATED)


def advance(slots: SeedSlots, where: Bools) -> None:
    """Moves to the next stage; entering BLENDING takes the first step of the ramp at once."""
    ramps = where & (slots.stage == SeedStage.TRAINING)
    _ramp(slots, ramps, slots.incubation_target, slots.tempo, STYLE_CURVE[slots.style])
    _enter(slots, where, _ADVANCED[slots.stage])


def fossilize(slots: SeedSlots, where: Bools) -> None:
    _enter(slots, where, SeedStage.FOSSILIZED)


def set_alpha_target(slots: SeedSlots, where: Bools, target: Floats, steps: Ints, curve: Ints) -> None:
    """Starts a new ramp; a target below 1 takes a seed from HOLDING back to BLENDING."""
    _ramp(slots, where, target, steps, curve)
    _enter(slots, where & (slots.stage == SeedStage.HOLDING) & (target < 1), SeedStage.BLENDING)


def prune(slots: SeedSlots, where: Bools, steps: Ints, curve: Ints) -> None:
    """Removes seeds: blended ones after fading to alpha 0 in ``steps`` epochs, others at once."""
    fades = where & IS_BLENDED[slots.stage] & (slots.alpha > 0) & (steps > 0)
    _ramp(slots, fades, np.zeros((1, 1)), steps, curve)
    slots.fading |= fades
    _enter(slots, fades & (slots.stage == SeedStage.HOLDING), SeedStage.BLENDING)
    cut(slots, where & ~(fades & (slots.alpha > 0)))


def cut(slots: SeedSlots, where: Bools) -> None:
    """Removes seeds now and starts the cooldown."""
    slots.clear(where)
    slots.stage[where] = SeedStage.PRUNED


def tick(slots: SeedSlots, active: Bools, embargo: int) -> None:
    """Ends an epoch in the envs of ``active`` bool [E]: alpha, clocks, faded seeds, cooldown (``embargo`` epochs)."""
    here = np.broadcast_to(active[:, None], slots.stage.shape)
    cooling, seeded = here & IS_COOLING[slots.stage], here & HAS_SEED[slots.stage]
    slots.epochs_in_stage += here
    needed = np.where(slots.stage == SeedStage.EMBARGOED, embargo, 1)
    _enter(slots, cooling & (slots.epochs_in_stage >= needed), _COOLED[slots.stage])
    slots.age += seeded
    _advance_alpha(slots, seeded)
    np.copyto(slots.alpha_velocity, slots.alpha - slots.alpha_at_tick, where=seeded)
    np.copyto(slots.alpha_at_tick, slots.alpha, where=seeded)
    cut(slots, seeded & slots.fading & slots.holding)


def judge(slots: SeedSlots, anomaly_pending: Bools, rules: Rules) -> None:
    """Sets ``gate_score`` and ``gate_passed`` of the next gates, as ``evaluate_gate`` does. NaN fails every check."""
    gates, durations, stage = rules.config.env.gates, rules.durations, slots.stage
    strict = gates.level == "strict"
    slack = gates.trial_standard_errors * slots.trial_error
    to_blending = [
        slots.epochs_in_stage >= durations.min_training_epochs,
        slots.exploding == 0,
        slots.gradient_health >= gates.min_gradient_health,
        slots.trial >= -slack * (not strict),
    ]
    to_holding = [slots.alpha_target >= 1.0, slots.holding]
    measured = ~np.isnan(slots.contribution) & ~np.isnan(slots.contribution_error)
    to_fossil = [measured, np.broadcast_to(~anomaly_pending[:, None], stage.shape)]
    if strict:
        to_blending.append(slots.gradient_ratio >= gates.min_gradient_ratio)
        to_holding.append(slots.epochs_in_stage >= durations.min_blending_epochs)
        to_fossil.append(slots.contribution >= gates.min_contribution)
        to_fossil.append(slots.contribution >= gates.contribution_standard_errors * slots.contribution_error)
    score = (stage == SeedStage.GERMINATED).astype(np.float64)
    for before, checks in (
        (SeedStage.TRAINING, to_blending),
        (SeedStage.BLENDING, to_holding),
        (SeedStage.HOLDING, to_fossil),
    ):
        held = np.sum(checks, axis=0)
        score = np.where(stage == before, held / len(checks), score)
    slots.gate_score, slots.gate_passed = score, score == 1.0


def automatic_gates(slots: SeedSlots, active: Bools, anomaly_pending: Bools, rules: Rules) -> None:
    """Opens automatic gates (``env.auto_advance``) and prunes seeds that fail an automatic G2 for too long."""
    automatic = [stage for stage, after in ADVANCES.items() if GATES[after][0] in rules.config.env.auto_advance]
    if not automatic:
        return
    judge(slots, anomaly_pending, rules)
    asked = active[:, None] & np.isin(slots.stage, automatic) & (slots.epochs_in_stage > 0)
    stuck = (slots.stage == SeedStage.TRAINING) & (slots.epochs_in_stage >= rules.durations.max_training_epochs)
    passed = slots.gate_passed
    cut(slots, asked & ~passed & stuck)
    advance(slots, asked & passed)


def _ramp(slots: SeedSlots, where: Bools, target: Floats, steps: Ints, curve: Ints) -> None:
    """Starts a ramp from the current alpha and takes its first step; 0 steps jump."""
    for values, new in (
        (slots.alpha_start, slots.alpha),
        (slots.alpha_target, target),
        (slots.alpha_steps, steps),
        (slots.alpha_done, 0),
        (slots.alpha_curve, curve),
    ):
        np.copyto(values, new, where=where)
    np.copyto(slots.alpha, slots.alpha_target, where=where & (slots.alpha_steps == 0))
    _advance_alpha(slots, where)


def _advance_alpha(slots: SeedSlots, where: Bools) -> None:
    """Takes one step of running ramps."""
    moving = where & ~slots.holding
    slots.alpha_done += moving
    start, target = slots.alpha_start, slots.alpha_target
    value = start + (target - start) * _RAMPS[slots.alpha_curve, slots.alpha_steps, slots.alpha_done]
    value = np.clip(value, np.minimum(start, target), np.maximum(start, target))
    np.copyto(slots.alpha, np.where(slots.holding, target, value), where=moving)


def _enter(slots: SeedSlots, where: Bools, stage: Ints | SeedStage) -> None:
    np.copyto(slots.stage, stage, where=where)
    slots.epochs_in_stage[where] = 0
