"""The life of a seed as a table of legal transitions; whatever is not in the table is an error."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType


class SeedStage(IntEnum):
    """Where the slot's seed is in its life. 0 and 5 are refused: no stage has these values."""

    DORMANT = 1
    GERMINATED = 2
    TRAINING = 3
    BLENDING = 4
    HOLDING = 6
    FOSSILIZED = 7
    PRUNED = 8
    EMBARGOED = 9
    RESETTING = 10


S = SeedStage

TRANSITIONS: Mapping[SeedStage, frozenset[SeedStage]] = MappingProxyType(
    {
        S.DORMANT: frozenset({S.GERMINATED}),
        S.GERMINATED: frozenset({S.TRAINING, S.PRUNED}),
        S.TRAINING: frozenset({S.BLENDING, S.PRUNED}),
        S.BLENDING: frozenset({S.HOLDING, S.PRUNED}),
        S.HOLDING: frozenset({S.FOSSILIZED, S.BLENDING, S.PRUNED}),
        S.FOSSILIZED: frozenset(),
        S.PRUNED: frozenset({S.EMBARGOED}),
        S.EMBARGOED: frozenset({S.RESETTING}),
        S.RESETTING: frozenset({S.DORMANT}),
    }
)

STAGES: tuple[SeedStage, ...] = tuple(SeedStage)
LIVING = frozenset({S.GERMINATED, S.TRAINING, S.BLENDING, S.HOLDING})
BLENDED = frozenset({S.BLENDING, S.HOLDING, S.FOSSILIZED})
"""Stages whose seed is in the forward pass."""
COOLDOWN = frozenset({S.PRUNED, S.EMBARGOED, S.RESETTING})
ADVANCES: Mapping[SeedStage, SeedStage] = MappingProxyType(
    {S.GERMINATED: S.TRAINING, S.TRAINING: S.BLENDING, S.BLENDING: S.HOLDING}
)
"""Where ADVANCE leads."""


class IllegalTransition(ValueError):
    """A transition that the table does not have."""


def check_transition(before: SeedStage, after: SeedStage) -> None:
    """Raise IllegalTransition, listing the legal ones, unless ``before`` → ``after`` is in the table."""
    if after not in TRANSITIONS[before]:
        legal = ", ".join(stage.name for stage in sorted(TRANSITIONS[before])) or "nothing: it is final"
        raise IllegalTransition(f"{before.name} cannot become {after.name}; it can become {legal}")
