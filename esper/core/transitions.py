"""Transitions of seeds between stages, for the slots of many envs at once.

``where`` is always bool [E, S] and selects the slots of a change, which the action mask has allowed before. Values are
[E, S], or [E, 1] for one value per env.
"""

from __future__ import annotations

import numpy as np

from esper.core.ramps import PROGRESS, STYLE_ADDED, STYLE_CURVE
from esper.core.slots import IS_COOLING, IS_ON, IS_RAMPED, Bools, Floats, Ints, Slots
from esper.core.stage import ADVANCES, COOLDOWN, TRANSITIONS, IllegalTransition, SeedStage, check_transition

# Tables by the values of stages: the next one by ADVANCE or in a cooldown (itself if none), and the legal transitions.
_VALUES = max(SeedStage) + 1
_ADVANCED = np.arange(_VALUES)
_COOLED = np.arange(_VALUES)
_LEGAL: Bools = np.zeros((_VALUES, _VALUES), dtype=np.bool_)
for _stage, _after in TRANSITIONS.items():
    _LEGAL[_stage, list(_after)] = True
    if _stage in ADVANCES:
        _ADVANCED[_stage] = ADVANCES[_stage]
    if _stage in COOLDOWN:
        _COOLED[_stage] = min(_after)  # the only one


def germinate(
    slots: Slots,
    where: Bools,
    blueprint: Ints,
    style: Ints,
    tempo: Ints,
    target: Floats,
    parameters: Ints,
) -> None:
    """Plants seeds; their first ramp goes to ``target`` in ``tempo`` epochs.

    Raises IllegalTransition unless the slots are DORMANT, as all functions here do for transitions not in the table.
    """
    _check(slots, where, SeedStage.GERMINATED)
    slots.empty(where)
    slots.write(
        where,
        blueprint=blueprint,
        style=style,
        tempo=tempo,
        incubation_target=target,
        parameters=parameters,
    )
    _enter(slots, where, SeedStage.GERMINATED)


def join(
    slots: Slots,
    where: Bools,
    blueprint: Ints,
    style: Ints,
    parameters: Ints,
) -> None:
    """Plants seeds that are a permanent part of their hosts at once, at alpha 1, as if they had passed all stages."""
    _check(slots, where, SeedStage.GERMINATED)
    slots.empty(where)
    slots.write(
        where,
        stage=SeedStage.FOSSILIZED,
        blueprint=blueprint,
        style=style,
        parameters=parameters,
        alpha=1.0,
        alpha_start=1.0,
        alpha_target=1.0,
        alpha_at_tick=1.0,
        incubation_target=1.0,
    )


def advance(slots: Slots, where: Bools) -> None:
    """Moves to the next stage; entering BLENDING takes the first step of the ramp at once."""
    ramps = where & (slots.stage == SeedStage.TRAINING)
    curve = STYLE_CURVE[slots.style]
    _ramp(slots, ramps, slots.incubation_target, slots.tempo, curve)
    _enter(slots, where, _ADVANCED[slots.stage])


def fossilize(slots: Slots, where: Bools) -> None:
    """Makes seeds a permanent part of their hosts."""
    _enter(slots, where, SeedStage.FOSSILIZED)


def merge(
    slots: Slots,
    where: Bools,
    parameters: Ints,
    flops: Floats,
    epoch: Ints,
    accuracy: Floats,
) -> None:
    """Frees the slots of fossils that have become a part of their host's layers, which gained these sizes [E, S].

    ``epoch`` [E, 1] is the number of epochs trained, ``accuracy`` [E, 1] that of the host, pp.
    """
    _check(slots, where, SeedStage.DORMANT)
    slots.write(where & (slots.merges == 0), first_merge=epoch)
    slots.write(
        where,
        merges=slots.merges + 1,
        last_merge=epoch,
        accuracy_at_merge=accuracy,
        merged_parameters=slots.merged_parameters + parameters,
        merged_flops=slots.merged_flops + flops,
    )
    slots.empty(where)


def release(
    slots: Slots,
    where: Bools,
    blueprint: Ints,
    sizes: Ints,
    parameters: Ints,
    flops: Floats,
) -> None:
    """Turns the units of the last merge of DORMANT slots into seeds again, which are on at alpha 1; :func:`prune` is
    to follow.

    ``blueprint`` and ``sizes`` are those of the seeds, and ``parameters`` and ``flops`` what the layers have lost,
    [E, S] each.
    """
    slots.empty(where)
    _enter(slots, where, SeedStage.BLENDING)
    slots.write(
        where,
        blueprint=blueprint,
        style=STYLE_ADDED[0],
        parameters=sizes,
        alpha=1.0,
        alpha_start=1.0,
        alpha_target=1.0,
        alpha_at_tick=1.0,
        incubation_target=1.0,
        merges=slots.merges - 1,
        merged_parameters=slots.merged_parameters - parameters,
        merged_flops=slots.merged_flops - flops,
    )
    slots.write(
        where & (slots.merges == 0),
        first_merge=-1,
        last_merge=-1,
        accuracy_at_merge=np.nan,
    )


def set_alpha_target(
    slots: Slots,
    where: Bools,
    target: Floats,
    steps: Ints,
    curve: Ints,
) -> None:
    """Starts a new ramp; a target below 1 takes a seed from HOLDING back to BLENDING.

    Raises IllegalTransition unless the seeds are in BLENDING or HOLDING and their alpha holds.
    """
    settable = IS_RAMPED[slots.stage] & slots.steady
    if (where & ~settable).any():
        raise IllegalTransition("an alpha target is set in BLENDING or HOLDING, while alpha holds")
    _ramp(slots, where, target, steps, curve)
    lowered = where & (slots.stage == SeedStage.HOLDING) & (target < 1)
    _enter(slots, lowered, SeedStage.BLENDING)


def prune(
    slots: Slots,
    where: Bools,
    steps: Ints,
    curve: Ints,
) -> None:
    """Removes seeds: blended ones after fading to alpha 0 in ``steps`` epochs, others at once."""
    # A seed that is on at alpha 0 has nothing to fade.
    fades = where & IS_ON[slots.stage] & (slots.alpha > 0) & (steps > 0)
    _ramp(slots, fades, np.zeros((1, 1)), steps, curve)
    slots.fading |= fades
    _enter(slots, fades & (slots.stage == SeedStage.HOLDING), SeedStage.BLENDING)
    # The first step of the ramp may have reached 0.
    blended = fades & (slots.alpha > 0)
    cut(slots, where & ~blended)


def cut(slots: Slots, where: Bools) -> None:
    """Removes living seeds at once and starts the cooldown."""
    _check(slots, where, SeedStage.PRUNED)
    revoke(slots, where)


def revoke(slots: Slots, where: Bools) -> None:
    """Removes seeds, also fossils: for a rollback, whose snapshot may be older than a fossil; else use :func:`cut`."""
    if where.any():
        slots.empty(where)
        slots.stage[where] = SeedStage.PRUNED


def tick(slots: Slots, where: Bools, embargo: int) -> None:
    """Ends an epoch: moves alpha and the clocks, removes faded seeds, and advances cooldowns (``embargo`` epochs)."""
    cooling = where & IS_COOLING[slots.stage]
    seeded = where & slots.occupied
    slots.epochs_in_stage += where
    slots.age += seeded

    needed = np.where(slots.stage == SeedStage.EMBARGOED, embargo, 1)
    cooled = cooling & (slots.epochs_in_stage >= needed)
    _enter(slots, cooled, _COOLED[slots.stage])

    _advance_alpha(slots, seeded)
    # Both values are computed before either field is written.
    slots.write(
        seeded,
        alpha_velocity=slots.alpha - slots.alpha_at_tick,
        alpha_at_tick=slots.alpha,
    )
    cut(slots, seeded & slots.fading & slots.steady)


def _ramp(
    slots: Slots,
    where: Bools,
    target: Floats,
    steps: Ints,
    curve: Ints,
) -> None:
    """Starts a ramp from the current alpha and takes its first step; 0 steps jump."""
    slots.write(
        where,
        alpha_start=slots.alpha,
        alpha_target=target,
        alpha_steps=steps,
        alpha_done=0,
        alpha_curve=curve,
    )
    jumps = where & (slots.alpha_steps == 0)
    slots.write(jumps, alpha=slots.alpha_target)
    _advance_alpha(slots, where)


def _advance_alpha(slots: Slots, where: Bools) -> None:
    """Takes one step of running ramps."""
    moving = where & ~slots.steady
    slots.alpha_done += moving
    start = slots.alpha_start
    target = slots.alpha_target
    progress = PROGRESS[slots.alpha_curve, slots.alpha_steps, slots.alpha_done]
    value = start + (target - start) * progress
    # Rounding must not take alpha beyond the ends of its ramp.
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
        before = SeedStage(slots.stage[first])
        after = SeedStage(np.broadcast_to(stage, where.shape)[first])
        check_transition(before, after)
