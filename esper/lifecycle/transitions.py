"""Transitions of seeds between stages, for the slots of many envs at once.

``where`` is always bool [E, S] and selects the slots of a change, which the action mask has allowed before. Values are
[E, S], or [E, 1] for one value per env.
"""

from __future__ import annotations

import numpy as np

from esper.lifecycle.ramps import PROGRESS, STYLE_CURVE
from esper.lifecycle.slots import IS_COOLING, IS_ON, IS_RAMPED, Bools, Floats, Ints, Slots
from esper.lifecycle.stage import ADVANCES, COOLDOWN, TRANSITIONS, IllegalTransition, SeedStage, check_transition

# Tables by the values of stages: the next one by ADVANCE or in a cooldown (itself if none), and the legal transitions.
_ADVANCED, _COOLED = np.arange(max(SeedStage) + 1), np.arange(max(SeedStage) + 1)
_LEGAL: Bools = np.zeros((max(SeedStage) + 1,) * 2, dtype=np.bool_)
for _stage, _after in TRANSITIONS.items():
    _LEGAL[_stage, list(_after)] = True
    _ADVANCED[_stage] = ADVANCES.get(_stage, _stage)
    _COOLED[_stage] = min(_after) if _stage in COOLDOWN else _stage


def germinate(
    slots: Slots, where: Bools, blueprint: Ints, style: Ints, tempo: Ints, target: Floats, parameters: Ints
) -> None:
    """Plants seeds; their first ramp goes to ``target`` in ``tempo`` epochs.

    Raises IllegalTransition unless the slots are DORMANT, as all functions here do for transitions not in the table.
    """
    _check(slots, where, SeedStage.GERMINATED)
    slots.clear(where)
    slots.write(where, blueprint=blueprint, style=style, tempo=tempo, incubation_target=target, parameters=parameters)
    _enter(slots, where, SeedStage.GERMINATED)


def join(slots: Slots, where: Bools, blueprint: Ints, style: Ints, parameters: Ints) -> None:
    """Plants seeds that are a permanent part of their hosts at once, at alpha 1, as if they had passed all stages."""
    _check(slots, where, SeedStage.GERMINATED)
    slots.clear(where)
    ramp = {"alpha": 1.0, "alpha_start": 1.0, "alpha_target": 1.0, "alpha_at_tick": 1.0, "incubation_target": 1.0}
    slots.write(where, stage=SeedStage.FOSSILIZED, blueprint=blueprint, style=style, parameters=parameters, **ramp)


def advance(slots: Slots, where: Bools) -> None:
    """Moves to the next stage; entering BLENDING takes the first step of the ramp at once."""
    ramps = where & (slots.stage == SeedStage.TRAINING)
    _ramp(slots, ramps, slots.incubation_target, slots.tempo, STYLE_CURVE[slots.style])
    _enter(slots, where, _ADVANCED[slots.stage])


def fossilize(slots: Slots, where: Bools) -> None:
    """Makes seeds a permanent part of their hosts."""
    _enter(slots, where, SeedStage.FOSSILIZED)


def set_alpha_target(slots: Slots, where: Bools, target: Floats, steps: Ints, curve: Ints) -> None:
    """Starts a new ramp; a target below 1 takes a seed from HOLDING back to BLENDING.

    Raises IllegalTransition unless the seeds are in BLENDING or HOLDING and their alpha holds.
    """
    if (where & ~(IS_RAMPED[slots.stage] & slots.steady)).any():
        raise IllegalTransition("an alpha target is set in BLENDING or HOLDING, while alpha holds")
    _ramp(slots, where, target, steps, curve)
    _enter(slots, where & (slots.stage == SeedStage.HOLDING) & (target < 1), SeedStage.BLENDING)


def prune(slots: Slots, where: Bools, steps: Ints, curve: Ints) -> None:
    """Removes seeds: blended ones after fading to alpha 0 in ``steps`` epochs, others at once."""
    fades = where & IS_ON[slots.stage] & (slots.alpha > 0) & (steps > 0)
    _ramp(slots, fades, np.zeros((1, 1)), steps, curve)
    slots.fading |= fades
    _enter(slots, fades & (slots.stage == SeedStage.HOLDING), SeedStage.BLENDING)
    cut(slots, where & ~(fades & (slots.alpha > 0)))


def cut(slots: Slots, where: Bools) -> None:
    """Removes living seeds at once and starts the cooldown."""
    _check(slots, where, SeedStage.PRUNED)
    revoke(slots, where)


def revoke(slots: Slots, where: Bools) -> None:
    """Removes seeds, also fossils: for a rollback, whose snapshot may be older than a fossil; else use :func:`cut`."""
    if where.any():
        slots.clear(where)
        slots.stage[where] = SeedStage.PRUNED


def tick(slots: Slots, where: Bools, embargo: int) -> None:
    """Ends an epoch: moves alpha and the clocks, removes faded seeds, and advances cooldowns (``embargo`` epochs)."""
    cooling, seeded = where & IS_COOLING[slots.stage], where & slots.occupied
    slots.epochs_in_stage += where
    needed = np.where(slots.stage == SeedStage.EMBARGOED, embargo, 1)
    _enter(slots, cooling & (slots.epochs_in_stage >= needed), _COOLED[slots.stage])
    slots.age += seeded
    _advance_alpha(slots, seeded)
    slots.write(seeded, alpha_velocity=slots.alpha - slots.alpha_at_tick, alpha_at_tick=slots.alpha)
    cut(slots, seeded & slots.fading & slots.steady)


def _ramp(slots: Slots, where: Bools, target: Floats, steps: Ints, curve: Ints) -> None:
    """Starts a ramp from the current alpha and takes its first step; 0 steps jump."""
    slots.write(where, alpha_start=slots.alpha, alpha_target=target, alpha_steps=steps, alpha_done=0, alpha_curve=curve)
    slots.write(where & (slots.alpha_steps == 0), alpha=slots.alpha_target)
    _advance_alpha(slots, where)


def _advance_alpha(slots: Slots, where: Bools) -> None:
    """Takes one step of running ramps."""
    moving = where & ~slots.steady
    slots.alpha_done += moving
    start, target = slots.alpha_start, slots.alpha_target
    value = start + (target - start) * PROGRESS[slots.alpha_curve, slots.alpha_steps, slots.alpha_done]
    value = np.clip(value, np.minimum(start, target), np.maximum(start, target))
    slots.write(moving, alpha=np.where(slots.steady, target, value))


def _enter(slots: Slots, where: Bools, stage: Ints | SeedStage) -> None:
    _check(slots, where, stage)
    slots.write(where, stage=stage, epochs_in_stage=0)


def _check(slots: Slots, where: Bools, stage: Ints | SeedStage) -> None:
    """Raises IllegalTransition, listing the legal ones, unless each change is in the table of transitions."""
    illegal = where & ~_LEGAL[slots.stage, stage]
    if illegal.any():
        first = tuple(np.argwhere(illegal)[0])
        check_transition(SeedStage(slots.stage[first]), SeedStage(np.broadcast_to(stage, where.shape)[first]))
