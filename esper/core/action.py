"""The action: eight heads of a MultiDiscrete space, in the order of ``HEADS``.

Tempos and alpha speeds are epochs; alpha targets are fractions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np

from esper.core.arrays import Ints


class Op(IntEnum):
    WAIT = 0
    GERMINATE = 1
    SET_ALPHA_TARGET = 2
    PRUNE = 3
    FOSSILIZE = 4
    ADVANCE = 5


HEADS = (
    "op",
    "slot",
    "blueprint",
    "style",
    "tempo",
    "alpha_target",
    "alpha_speed",
    "alpha_curve",
)
STYLES = ("LINEAR_ADD", "LINEAR_MULTIPLY", "SIGMOID_ADD", "GATED_GATE")
TEMPOS = (3, 5, 8)
ALPHA_TARGETS = (0.5, 0.7, 1.0)
ALPHA_SPEEDS = (0, 3, 5, 8)
ALPHA_CURVES = (
    "linear",
    "cosine",
    "logistic_6",
    "logistic_12",
    "logistic_24",
)

RELEVANT: Mapping[Op, tuple[str, ...]] = {
    Op.WAIT: (),
    Op.GERMINATE: ("slot", "blueprint", "style", "tempo", "alpha_target"),
    Op.SET_ALPHA_TARGET: ("slot", "alpha_target", "alpha_speed", "alpha_curve"),
    Op.PRUNE: ("slot", "alpha_speed", "alpha_curve"),
    Op.FOSSILIZE: ("slot",),
    Op.ADVANCE: ("slot",),
}
"""Heads that matter for each op; the others are 0."""


@dataclass(frozen=True)
class ActionSpec:
    """The meaning of the heads' indices for one host: its slots (row-major) and its topology's blueprints."""

    slots: tuple[str, ...]
    blueprints: tuple[str, ...]
    offered: tuple[tuple[str, ...], ...] = ()
    """The blueprints that fit in each slot; empty if all fit everywhere."""

    def offers(self, slot: str) -> tuple[str, ...]:
        """Returns the blueprints that fit in ``slot``."""
        if not self.offered:
            return self.blueprints
        return self.offered[self.slots.index(slot)]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of choices of each head, in the order of ``HEADS``."""
        return tuple(len(self.choices(head)) for head in HEADS)

    def encode(
        self,
        op: Op,
        slot: str | None = None,
        blueprint: str | None = None,
        style: str = "LINEAR_ADD",
        tempo: int = 5,
        alpha_target: float = 1.0,
        alpha_speed: int = 0,
        alpha_curve: str = "linear",
    ) -> Ints:
        """Returns the action int64 [8] with these values; heads that do not matter for ``op`` are 0.

        Raises ValueError listing the choices if a value is missing or is not a choice of its head, or if a blueprint
        does not fit the slot.
        """
        values = {
            "slot": slot,
            "blueprint": blueprint,
            "style": style,
            "tempo": tempo,
            "alpha_target": alpha_target,
            "alpha_speed": alpha_speed,
            "alpha_curve": alpha_curve,
        }
        if op not in tuple(Op):
            raise ValueError(f"op {op!r} is not one of: {', '.join(f'Op.{name}' for name in Op.__members__)}")
        action = np.zeros(len(HEADS), dtype=np.int64)
        action[0] = op
        # In the order of HEADS, so that the first wrong value is the one that is named.
        for head in RELEVANT[op]:
            action[HEADS.index(head)] = self.index(head, values[head])

        if op is Op.GERMINATE:
            fitting = self.offers(self.slots[action[1]])
            if blueprint not in fitting:
                raise ValueError(
                    f"blueprint {blueprint!r} does not fit in slot {slot}, where these do: {', '.join(fitting)}"
                )
        return action

    def decode(self, action: Ints) -> dict[str, Any]:
        """Returns the values of the heads that matter for the op of ``action`` int64 [8], by head, "op" first."""
        op = Op(int(action[0]))
        values = {}
        for head in ("op", *RELEVANT[op]):
            choice = int(action[HEADS.index(head)])
            values[head] = self.choices(head)[choice]
        return values

    def choices(self, head: str) -> tuple[object, ...]:
        """Returns the values behind a head's indices."""
        return {
            "op": tuple(op.name for op in Op),
            "slot": self.slots,
            "blueprint": self.blueprints,
            "style": STYLES,
            "tempo": TEMPOS,
            "alpha_target": ALPHA_TARGETS,
            "alpha_speed": ALPHA_SPEEDS,
            "alpha_curve": ALPHA_CURVES,
        }[head]

    def index(self, head: str, value: object) -> int:
        """Returns the index of a head's value. Raises ValueError, which lists the choices, for an unknown value."""
        choices = self.choices(head)
        if value is None:
            raise ValueError(f"{head} is missing; choose one of: {', '.join(map(str, choices))}")
        if value not in choices:
            raise ValueError(f"{head} {value!r} is not one of: {', '.join(map(str, choices))}")
        return choices.index(value)


def integers_of(actions: Any) -> Ints:
    """Returns indices of choices as int64, of any shape; they may be in tensors or lists.

    Raises ValueError for anything but integers: a fraction or a truth value would silently choose something else.
    """
    values = actions
    if isinstance(values, list | tuple):
        values = [entry.tolist() if hasattr(entry, "tolist") else entry for entry in values]
    elif hasattr(values, "detach"):  # a tensor, which may lie on a GPU or need gradients
        values = values.tolist()
    try:
        array = np.asarray(values)
    except ValueError:  # rows of several lengths
        raise ValueError(f"actions must be one array of integers, not {actions!r}") from None
    if array.dtype.kind in "iu":
        integers = array.astype(np.int64)
        if (integers == array).all():
            return integers
    raise ValueError(f"actions must be integers, not {actions!r}")


def joint_actions(spec: ActionSpec) -> Ints:
    """Returns every joint action once, int64 [N, 8], WAIT first; heads that do not matter for an op are 0."""
    rows: list[tuple[int, ...]] = []
    for op in Op:
        choices = [range(op, op + 1)]  # the op itself
        for head, size in zip(HEADS[1:], spec.sizes[1:], strict=True):
            count = size if head in RELEVANT[op] else 1
            choices.append(range(count))
        rows += itertools.product(*choices)
    return np.array(rows, dtype=np.int64)


def nearest_tempo(epochs: float) -> int:
    """Returns the tempo that is nearest to a number of epochs; of two that are equally near, the shorter one."""
    # Tempos are in rising order, and min returns the first of equal ones.
    return min(TEMPOS, key=lambda tempo: abs(tempo - epochs))
