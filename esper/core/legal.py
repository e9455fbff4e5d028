"""Legality of ops in slots, and the blueprints that each slot can afford."""

from __future__ import annotations

import numpy as np

from esper.config import Durations, EnvConfig
from esper.core.action import Op
from esper.core.gates import GATES
from esper.core.mask import ActionMask
from esper.core.slots import IS_RAMPED, Bools, Slots, stage_table
from esper.core.stage import ADVANCES, COOLDOWN, SeedStage

IS_BUSY = stage_table({SeedStage.GERMINATED, SeedStage.TRAINING, *COOLDOWN})


def legal_actions(
    slots: Slots,
    config: EnvConfig,
    durations: Durations,
    affordable: Bools,
    shrinkable: Bools | None = None,
) -> ActionMask:
    """Returns the masks of all envs in their current state.

    - GERMINATE: empty slots of hosts with room for a seed, within the budget.
    - ADVANCE: seeds in GERMINATED, TRAINING or BLENDING whose gate is not automatic.
    - FOSSILIZE: seeds in HOLDING.
    - PRUNE: living seeds that are old enough and whose alpha is steady; slots whose layers can shrink.
    - SET_ALPHA_TARGET: seeds in BLENDING or HOLDING whose alpha is steady.

    A slot is acted on once before an epoch: what an action does shows only in training.

    ``affordable`` [E, S, B] are the blueprints that fit in each slot, within the budget. ``shrinkable`` [E, S] are the
    slots from whose layers units can be taken; None: no slot.
    """
    # Gates that open by themselves leave nothing to ADVANCE.
    by_hand = stage_table([stage for stage in ADVANCES if GATES[stage] not in config.auto_advance])
    old_enough = slots.age >= durations.min_prune_age
    steady = slots.steady

    envs, places = slots.stage.shape
    op_slot = np.zeros((envs, len(Op), places), dtype=np.bool_)
    op_slot[:, Op.GERMINATE] = _has_room(slots, config)[:, None] & (slots.stage == SeedStage.DORMANT)
    op_slot[:, Op.ADVANCE] = by_hand[slots.stage]
    op_slot[:, Op.FOSSILIZE] = slots.stage == SeedStage.HOLDING
    op_slot[:, Op.PRUNE] = slots.living & old_enough & steady
    if shrinkable is not None:
        op_slot[:, Op.PRUNE] |= shrinkable
    op_slot[:, Op.SET_ALPHA_TARGET] = IS_RAMPED[slots.stage] & steady
    op_slot &= ~slots.edited[:, None]
    return ActionMask.build(op_slot, affordable)


def _has_room(slots: Slots, config: EnvConfig) -> Bools:
    """Bool [E]: below both caps and, with ``one_incubating``, no seed in GERMINATED, TRAINING or cooldown in the host.

    Living seeds also count against ``max_fossils``: a seed that could never be kept is not planted.
    """
    living = slots.living.sum(axis=1)
    room = living < config.max_seeds
    if config.max_fossils is not None:
        room &= living + slots.kept < config.max_fossils
    if config.one_incubating:
        room &= ~IS_BUSY[slots.stage].any(axis=1)
    return np.asarray(room)
