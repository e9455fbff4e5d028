"""Which ops are legal in which slots, and which blueprints a slot can afford."""

from __future__ import annotations

import numpy as np

from esper.env.episode import Episode
from esper.seeds.blend import gate_parameters
from esper.seeds.blueprints import Blueprint
from esper.seeds.gate import GATES
from esper.seeds.slot import SeedSlot
from esper.seeds.stage import ADVANCES, COOLDOWN, SeedStage
from esper.spaces.action import ActionSpec, Op
from esper.spaces.mask import ActionMask


def legal_actions(episodes: list[Episode], spec: ActionSpec) -> ActionMask:
    """The masks of all envs in their present state."""
    op_slot = np.zeros((len(episodes), len(Op), len(spec.slots)), dtype=np.bool_)
    affordable = np.zeros((len(episodes), len(spec.slots), len(spec.blueprints)), dtype=np.bool_)
    for e, episode in enumerate(episodes):
        room = may_germinate(episode)
        left = episode.budget - episode.training.seed_parameters
        for s, slot in enumerate(episode.slots):
            op_slot[e, Op.GERMINATE, s] = room and slot.stage is SeedStage.DORMANT
            op_slot[e, Op.ADVANCE, s] = may_advance(episode, slot)
            op_slot[e, Op.FOSSILIZE, s] = slot.stage is SeedStage.HOLDING
            op_slot[e, Op.PRUNE, s] = may_prune(episode, slot)
            op_slot[e, Op.SET_ALPHA_TARGET, s] = may_retarget(slot)
            for b, name in enumerate(spec.blueprints):
                blueprint = episode.world.blueprints.get(episode.training.host.topology, name)
                affordable[e, s, b] = largest_size(blueprint, slot.site.channels) <= left
    return ActionMask.build(op_slot, affordable)


def may_germinate(episode: Episode) -> bool:
    """Below both caps and, with ``one_incubating``, no seed in GERMINATED, TRAINING or cooldown in this host.

    Living seeds count against ``max_fossils`` too: a seed that could never be kept is not planted.
    """
    env, slots = episode.world.config.env, episode.slots
    living = sum(slot.living for slot in slots)
    fossils = sum(slot.stage is SeedStage.FOSSILIZED for slot in slots)
    busy = any(slot.stage in (SeedStage.GERMINATED, SeedStage.TRAINING) or slot.stage in COOLDOWN for slot in slots)
    kept = env.max_fossils if env.max_fossils is not None else len(slots)
    return living < env.max_seeds and living + fossils < kept and not (env.one_incubating and busy)


def may_advance(episode: Episode, slot: SeedSlot) -> bool:
    """A seed in GERMINATED, TRAINING or BLENDING whose gate is not automatic."""
    target = ADVANCES.get(slot.stage)
    return target is not None and GATES[target][0] not in episode.world.config.env.auto_advance


def may_prune(episode: Episode, slot: SeedSlot) -> bool:
    """A living seed that is old enough and whose alpha holds."""
    return slot.living and slot.age >= episode.training.durations.min_prune_age and slot.alpha.holding


def may_retarget(slot: SeedSlot) -> bool:
    """A seed in BLENDING or HOLDING whose alpha holds."""
    return slot.stage in (SeedStage.BLENDING, SeedStage.HOLDING) and slot.alpha.holding


def largest_size(blueprint: Blueprint, channels: int) -> int:
    """Parameters of the seed with its largest blend style, the gated one: affordable means affordable in any style."""
    return blueprint.parameters(channels) + gate_parameters(channels)
