"""The stages of a seed and the table of legal transitions; any other transition is an error."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class SeedStage(IntEnum):
    """Stage of a slot and its seed."""

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

TRANSITIONS: Mapping[SeedStage, frozenset[SeedStage]] = {
    S.DORMANT: frozenset({S.GERMINATED, S.BLENDING}),  # units that are taken out of a layer fade
    S.GERMINATED: frozenset({S.TRAINING, S.PRUNED}),
    S.TRAINING: frozenset({S.BLENDING, S.PRUNED}),
    S.BLENDING: frozenset({S.HOLDING, S.PRUNED}),
    S.HOLDING: frozenset({S.FOSSILIZED, S.BLENDING, S.PRUNED}),
    S.FOSSILIZED: frozenset({S.DORMANT}),
    S.PRUNED: frozenset({S.EMBARGOED}),
    S.EMBARGOED: frozenset({S.RESETTING}),
    S.RESETTING: frozenset({S.DORMANT}),
}

STAGES: tuple[SeedStage, ...] = tuple(SeedStage)
LIVING = frozenset({S.GERMINATED, S.TRAINING, S.BLENDING, S.HOLDING})
ON = frozenset({S.BLENDING, S.HOLDING, S.FOSSILIZED})
"""Stages in which the seed is in the forward pass."""
COOLDOWN = frozenset({S.PRUNED, S.EMBARGOED, S.RESETTING})
ADVANCES: Mapping[SeedStage, SeedStage] = {
    S.GERMINATED: S.TRAINING,
    S.TRAINING: S.BLENDING,
    S.BLENDING: S.HOLDING,
}
"""The stage to which ADVANCE leads, by the current stage."""


class IllegalTransition(ValueError):
    """Raised for a transition that is not in the table."""


def check_transition(before: SeedStage, after: SeedStage) -> None:
    """Raises IllegalTransition, listing the legal ones, unless ``before`` → ``after`` is in the table."""
    if after not in TRANSITIONS[before]:
        names = [stage.name for stage in sorted(TRANSITIONS[before])]
        legal = ", ".join(names) or "nothing: it is final"
        raise IllegalTransition(f"{before.name} cannot become {after.name}; it can become {legal}")
