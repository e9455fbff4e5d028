"""Legality of ops in slots, and the blueprints that each slot can afford."""

from __future__ import annotations

import numpy as np

from esper.env.fleet import Bools, Fleet, Rules, Slots, stage_table
from esper.seeds.gate import GATES
from esper.seeds.stage import ADVANCES, COOLDOWN, SeedStage
from esper.spaces.action import Op
from esper.spaces.mask import ActionMask

IS_BUSY = stage_table({SeedStage.GERMINATED, SeedStage.TRAINING, *COOLDOWN})


def legal_actions(fleet: Fleet, rules: Rules) -> ActionMask:
    """Returns the masks of all envs in their current state."""
    slots = fleet.slots
    envs, places = slots.stage.shape
    op_slot = np.zeros((envs, len(Op), places), dtype=np.bool_)
    op_slot[:, Op.GERMINATE] = may_germinate(slots, rules)[:, None] & (slots.stage == SeedStage.DORMANT)
    op_slot[:, Op.ADVANCE] = may_advance(slots, rules)
    op_slot[:, Op.FOSSILIZE] = slots.stage == SeedStage.HOLDING
    op_slot[:, Op.PRUNE] = may_prune(slots, rules)
    op_slot[:, Op.SET_ALPHA_TARGET] = may_retarget(slots)
    left = rules.budget - slots.parameters.sum(axis=1)
    return ActionMask.build(op_slot, rules.largest <= left[:, None, None])


def may_germinate(slots: Slots, rules: Rules) -> Bools:
    """Bool [E]: below both caps and, with ``one_incubating``, no seed in GERMINATED, TRAINING or cooldown in the host.

    Living seeds also count against ``max_fossils``: a seed that could never be kept is not planted.
    """
    env, places = rules.config.env, slots.stage.shape[1]
    living, fossils = slots.living.sum(axis=1), slots.fossil.sum(axis=1)
    busy = IS_BUSY[slots.stage].any(axis=1)
    kept = env.max_fossils if env.max_fossils is not None else places
    room = (living < env.max_seeds) & (living + fossils < kept)
    return np.asarray(room & ~busy if env.one_incubating else room)


def may_advance(slots: Slots, rules: Rules) -> Bools:
    """Bool [E, S]: a seed in GERMINATED, TRAINING or BLENDING whose gate is not automatic."""
    manual = [stage for stage, after in ADVANCES.items() if GATES[after][0] not in rules.config.env.auto_advance]
    return stage_table(manual)[slots.stage]


def may_prune(slots: Slots, rules: Rules) -> Bools:
    """Bool [E, S]: a living seed that is old enough and whose alpha holds."""
    return np.asarray(slots.living & (slots.age >= rules.durations.min_prune_age) & slots.holding)


def may_retarget(slots: Slots) -> Bools:
    """Bool [E, S]: a seed in BLENDING or HOLDING whose alpha holds."""
    blended = (slots.stage == SeedStage.BLENDING) | (slots.stage == SeedStage.HOLDING)
    return np.asarray(blended & slots.holding)
