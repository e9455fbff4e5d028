"""Tables of legal actions for all envs at once; True is legal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.spaces.action import HEADS, RELEVANT, ActionSpec, Op

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class ActionMask:
    """Exact action masks of E envs. Any choice of the heads after op, slot and blueprint is legal."""

    op: Bools
    """Legal ops [E, ops]."""
    op_slot: Bools
    """Slots in which each op applies [E, ops, S]; all True for WAIT, whose slot does not matter."""
    slot_blueprint: Bools
    """Blueprints that each slot can afford [E, S, B]."""

    @classmethod
    def build(cls, op_slot: Bools, slot_blueprint: Bools) -> ActionMask:
        """Builds masks from the tables ``op_slot`` [E, ops, S] and ``slot_blueprint`` [E, S, B].

        An op is legal if it has a slot; GERMINATE needs a slot that can afford a blueprint.
        """
        op_slot = op_slot.copy()
        op_slot[:, Op.GERMINATE] &= slot_blueprint.any(axis=2)
        op_slot[:, Op.WAIT] = True
        return cls(np.asarray(op_slot.any(axis=2)), op_slot, slot_blueprint)

    def legal(self, env: int | NDArray[np.int64], row: NDArray[np.int64]) -> Bools:
        """Returns whether an env's action [8] is legal; also for many, with envs [E] and rows [E, 8].

        The entries must be in range.
        """
        op, slot, blueprint = row[..., 0], row[..., 1], row[..., 2]
        planted = (op != Op.GERMINATE) | self.slot_blueprint[env, slot, blueprint]
        return np.asarray((op == Op.WAIT) | (self.op_slot[env, op, slot] & planted))

    def illegal(self, spec: ActionSpec, env: int, row: NDArray[np.int64]) -> dict[str, tuple[str, ...]]:
        """Returns the names of an env's illegal choices by head, given the heads of the action ``row`` [8] before it.

        Heads that do not matter for its op, and heads whose choices are all legal, are missing.
        """
        op, slot = Op(int(row[0])), int(row[1])
        tables = {"op": self.op[env], "slot": self.op_slot[env, op], "blueprint": self.slot_blueprint[env, slot]}
        masked = {
            head: tuple(str(spec.choices(head)[choice]) for choice in np.flatnonzero(~legal).tolist())
            for head, legal in tables.items()
            if head == "op" or head in RELEVANT[op]
        }
        return {head: names for head, names in masked.items() if names}

    def heads(self, spec: ActionSpec) -> dict[str, Bools]:
        """Returns ``info["action_mask"]``: a mask bool [E, n] per head, and the joint tables "op_slot" [E, ops, S] and
        "slot_blueprint" [E, S, B].

        A head's mask marks the choices that are legal for some choice of the other heads.
        """
        envs = len(self.op)
        masks = {head: np.ones((envs, size), dtype=np.bool_) for head, size in zip(HEADS, spec.sizes, strict=True)}
        masks["op"] = self.op
        # If only WAIT is legal, the slot does not matter: all True, since a mask needs at least one legal choice.
        masks["slot"] = _or_all(self.op_slot[:, 1:].any(axis=1))
        masks["blueprint"] = _or_all((self.slot_blueprint & self.op_slot[:, Op.GERMINATE, :, None]).any(axis=1))
        return {**masks, "op_slot": self.op_slot, "slot_blueprint": self.slot_blueprint}


def legal_joint_actions(actions: NDArray[np.int64], masks: Mapping[str, Bools]) -> Bools:
    """Returns whether each joint action [N, 8] is legal, bool [E, N]; ``masks`` is ``info["action_mask"]``."""
    mask = ActionMask(masks["op"], masks["op_slot"], masks["slot_blueprint"])
    return mask.legal(np.arange(len(mask.op))[:, None], actions)


def _or_all(mask: Bools | np.bool_) -> Bools:
    return np.asarray(mask | ~np.any(mask, axis=1, keepdims=True))
