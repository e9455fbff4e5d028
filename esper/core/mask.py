"""Tables of legal actions for all envs at once; True is legal."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from esper.core.action import HEADS, RELEVANT, ActionSpec, Op
from esper.core.arrays import Bools, Ints


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
        op_slot = op_slot.copy()  # the caller's table stays as it is
        op_slot[:, Op.GERMINATE] &= slot_blueprint.any(axis=2)
        op_slot[:, Op.WAIT] = True
        return cls(np.any(op_slot, axis=2), op_slot, slot_blueprint)

    def legal(self, env: int | Ints, row: Ints) -> Bools:
        """True if an env's action [8] is legal; also for many, with envs [E] and rows [E, 8].

        The entries must be in range.
        """
        op = row[..., 0]
        slot = row[..., 1]
        blueprint = row[..., 2]
        affordable = (op != Op.GERMINATE) | self.slot_blueprint[env, slot, blueprint]
        return np.asarray((op == Op.WAIT) | (self.op_slot[env, op, slot] & affordable))

    def why_illegal(self, spec: ActionSpec, env: int, row: Ints) -> str:
        """Returns the first reason that an env's action [8], which is illegal, is so."""
        values = spec.decode(row)
        op, slot = values["op"], values.get("slot")
        if not self.op[env, row[0]]:
            return f"{op} was legal in no slot"
        if not self.op_slot[env, row[0], row[1]]:
            return f"{op} was not legal in {slot}"
        return f"{values['blueprint']} could not be planted in {slot}"

    def illegal(
        self,
        spec: ActionSpec,
        env: int,
        row: Ints,
    ) -> dict[str, tuple[str, ...]]:
        """Returns the names of an env's illegal choices by head, given the heads of the action ``row`` [8] before it.

        Heads that do not matter for its op, and heads whose choices are all legal, are missing.
        """
        op = Op(int(row[0]))
        slot = int(row[1])
        tables = {
            "op": self.op[env],
            "slot": self.op_slot[env, op],
            "blueprint": self.slot_blueprint[env, slot],
        }
        masked = {}
        for head, legal in tables.items():
            if head != "op" and head not in RELEVANT[op]:
                continue
            choices = spec.choices(head)
            names = tuple(str(choices[choice]) for choice in np.flatnonzero(~legal).tolist())
            if names:
                masked[head] = names
        return masked

    def heads(self, spec: ActionSpec, settled: Collection[str] = ()) -> dict[str, Bools]:
        """Returns ``info["action_mask"]``: a mask bool [E, n] per head, and the joint tables "op_slot" [E, ops, S] and
        "slot_blueprint" [E, S, B].

        A head's mask marks the choices that are legal for some choice of the other heads; of ``settled`` heads, whose
        choices all do the same, the first one only.
        """
        envs = len(self.op)
        masks = {head: np.ones((envs, size), dtype=np.bool_) for head, size in zip(HEADS, spec.sizes, strict=True)}
        for head in settled:
            masks[head][:, 1:] = False
        masks["op"] = self.op
        # If only WAIT is legal, the slot does not matter: all True, since a mask needs at least one legal choice.
        masks["slot"] = _or_all(self.op_slot[:, 1:].any(axis=1))
        plantable = self.slot_blueprint & self.op_slot[:, Op.GERMINATE, :, None]
        masks["blueprint"] = _or_all(plantable.any(axis=1))

        # A choice may be legal by itself only, so a controller that chooses exactly needs the joint tables.
        masks["op_slot"] = self.op_slot
        masks["slot_blueprint"] = self.slot_blueprint
        return masks


def legal_joint_actions(actions: Ints, masks: Mapping[str, Bools]) -> Bools:
    """Marks the legal joint actions among ``actions`` [N, 8], bool [E, N]; ``masks`` is ``info["action_mask"]``."""
    mask = ActionMask(
        masks["op"],
        masks["op_slot"],
        masks["slot_blueprint"],
    )
    # Envs [E, 1] and actions [N, 8] broadcast to [E, N].
    envs = np.arange(len(mask.op))[:, None]
    return mask.legal(envs, actions)


def _or_all(mask: Bools | np.bool_) -> Bools:
    """Returns a mask [E, n] with True everywhere in rows that have no True."""
    return np.asarray(mask | ~np.any(mask, axis=1, keepdims=True))
