"""Which actions are legal, as tables for all envs at once: True is legal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.spaces.action import HEADS, ActionSpec, Op

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class ActionMask:
    """Exact masks of E envs. ``op_slot`` says in which slots an op applies; ``slot_blueprint`` which blueprints a slot
    can afford; the heads after these are always free."""

    op: Bools
    """[E, ops]"""
    op_slot: Bools
    """[E, ops, S]; the row of WAIT is all True, its slot does not matter"""
    slot_blueprint: Bools
    """[E, S, B]"""

    @classmethod
    def build(cls, op_slot: Bools, slot_blueprint: Bools) -> ActionMask:
        """From the tables: an op is legal where it has a slot. GERMINATE needs a slot that can afford a blueprint."""
        op_slot = op_slot.copy()
        op_slot[:, Op.GERMINATE] &= slot_blueprint.any(axis=2)
        op_slot[:, Op.WAIT] = True
        return cls(np.asarray(op_slot.any(axis=2)), op_slot, slot_blueprint)

    def legal(self, env: int | NDArray[np.int64], row: NDArray[np.int64]) -> Bools:
        """Whether an env's action [8], with entries in range, may be executed; or for many envs [E] and rows [E, 8]."""
        op, slot, blueprint = row[..., 0], row[..., 1], row[..., 2]
        planted = (op != Op.GERMINATE) | self.slot_blueprint[env, slot, blueprint]
        return np.asarray((op == Op.WAIT) | (self.op_slot[env, op, slot] & planted))

    def heads(self, spec: ActionSpec) -> dict[str, Bools]:
        """``info["action_mask"]``: a mask [E, n] for each head (what is legal for some choice of the others), and the
        joint tables "op_slot" [E, ops, S] and "slot_blueprint" [E, S, B]."""
        envs = len(self.op)
        masks = {head: np.ones((envs, size), dtype=np.bool_) for head, size in zip(HEADS, spec.sizes, strict=True)}
        masks["op"] = self.op
        # Where nothing but WAIT is legal the slot does not matter, and a mask without any True helps nobody.
        masks["slot"] = _or_all(np.asarray(self.op_slot[:, 1:].any(axis=1)))
        masks["blueprint"] = _or_all(
            np.asarray((self.slot_blueprint & self.op_slot[:, Op.GERMINATE, :, None]).any(axis=1))
        )
        return {**masks, "op_slot": self.op_slot, "slot_blueprint": self.slot_blueprint}


def _or_all(mask: Bools) -> Bools:
    return mask | ~mask.any(axis=1, keepdims=True)
