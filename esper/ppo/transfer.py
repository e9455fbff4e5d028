"""What a network knows of blueprints goes by their names, so that it can play hosts that have others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

PER_BLUEPRINT = {"blueprints": 0, "seed_kinds.weight": 1}
"""Weights with one row a blueprint, and how many rows come before the first one's."""


def for_blueprints(weights: Mapping[str, Tensor], known: Sequence[str], wanted: Sequence[str]) -> dict[str, Tensor]:
    """The weights of a network that learned the blueprints ``known``, for hosts with the blueprints ``wanted``.

    A known name keeps its rows. One that was never met gets the mean of all known rows: so it scores as the average of
    what is known, and is planted where that is better than what else there is.

    Raises:
        ValueError: no name is shared, so that nothing is known of any blueprint here; lists both.
    """
    if not set(known) & set(wanted):
        raise ValueError(f"it knows the blueprints {', '.join(known)}; here are {', '.join(wanted)}")
    moved = dict(weights)
    for name, before in PER_BLUEPRINT.items():
        rows = weights[name]
        learned = dict(zip(known, rows[before:], strict=True))
        typical = rows[before:].mean(dim=0)
        moved[name] = torch.cat((rows[:before], torch.stack([learned.get(wish, typical) for wish in wanted])))
    return moved
