"""Slots in a wanted state."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from esper.core import transitions
from esper.core.action import ALPHA_CURVES, STYLES
from esper.core.slots import Bools, Slots
from esper.core.stage import SeedStage

LINEAR = ALPHA_CURVES.index("linear")


def every(slots: Slots) -> Bools:
    """Selects all slots, bool [E, S]."""
    return np.ones_like(slots.fading)


def made(envs: int = 1, places: int = 1, **fields: Any) -> Slots:
    """Fresh slots [E, S] with these values in their fields; a measurement that is None was not made."""
    slots = Slots.fresh(envs, places)
    for name, value in fields.items():
        getattr(slots, name)[...] = np.nan if value is None else value
    return slots


def grown(
    stage: SeedStage,
    envs: int = 1,
    places: int = 1,
    tempo: int = 0,
    target: float = 1.0,
) -> Slots:
    """Slots whose seeds have come to ``stage`` by transitions, without an epoch between them."""
    slots = Slots.fresh(envs, places)
    if stage is SeedStage.DORMANT:
        return slots
    germinate(slots, tempo, target)
    advances = [
        SeedStage.GERMINATED,
        SeedStage.TRAINING,
        SeedStage.BLENDING,
        SeedStage.HOLDING,
    ]
    for _ in range(advances.index(stage) if stage in advances else 3):
        transitions.advance(slots, every(slots))
    if stage is SeedStage.FOSSILIZED:
        transitions.fossilize(slots, every(slots))
    elif stage is SeedStage.PRUNED:
        transitions.cut(slots, every(slots))
    return slots


def germinate(slots: Slots, tempo: int = 0, target: float = 1.0) -> None:
    style = column(STYLES.index("LINEAR_ADD"))
    transitions.germinate(
        slots,
        every(slots),
        column(1),
        style,
        column(tempo),
        column(target),
        column(100),
    )


def column(value: float) -> NDArray[Any]:
    """The same value for every env and slot, [1, 1]."""
    return np.full((1, 1), value)


def set_target(slots: Slots, target: float, steps: int, curve: int = LINEAR) -> None:
    transitions.set_alpha_target(
        slots, every(slots), column(target), column(steps), column(curve)
    )


def tick(slots: Slots, embargo: int = 5) -> None:
    transitions.tick(slots, every(slots), embargo)


def prune(slots: Slots, steps: int) -> None:
    transitions.prune(slots, every(slots), column(steps), column(LINEAR))
