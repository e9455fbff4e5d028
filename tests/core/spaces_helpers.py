"""One action decoded, and one env's observation from plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.core.action import (
    ALPHA_CURVES,
    ALPHA_SPEEDS,
    ALPHA_TARGETS,
    STYLES,
    TEMPOS,
    Op,
)
from esper.core.observation import PER_CHOICE, PER_SLOT, ObservationLayout


@dataclass(frozen=True)
class Action:
    """One env's action, decoded."""

    op: Op
    slot: int
    blueprint: int
    style: str
    tempo: int
    alpha_target: float
    alpha_speed: int
    alpha_curve: str

    @classmethod
    def decode(cls, row: NDArray[np.int64]) -> Action:
        """Decodes one row int64 [8] whose entries are in range."""
        op, slot, blueprint, style, tempo, target, speed, curve = (
            int(value) for value in row
        )
        return cls(
            op=Op(op),
            slot=slot,
            blueprint=blueprint,
            style=STYLES[style],
            tempo=TEMPOS[tempo],
            alpha_target=ALPHA_TARGETS[target],
            alpha_speed=ALPHA_SPEEDS[speed],
            alpha_curve=ALPHA_CURVES[curve],
        )


def one_observation(
    layout: ObservationLayout,
    base: Mapping[str, float],
    per_slot: Mapping[str, Mapping[str, float]],
    **per_choice: float | NDArray[np.float64],
) -> NDArray[np.float32]:
    """One env's observation, float32 [size], from plain numbers by name; those of a (slot, blueprint) are [S, B] or one
    number, and 0 if not given."""
    choices = {entry.name: per_choice.get(entry.name, 0.0) for entry in PER_CHOICE}
    slots = {
        entry.name: [[per_slot[slot][entry.name] for slot in layout.slots]]
        for entry in PER_SLOT
    }
    return np.asarray(
        layout.vectors(
            {name: np.array([value]) for name, value in base.items()}, slots, choices
        )[0]
    )
