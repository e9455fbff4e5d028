"""Matches a network's blueprint weights by name, so that it can play hosts with other blueprints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

PER_BLUEPRINT = {"blueprints": 0, "seed_kinds.weight": 1}
"""Weights with one row per blueprint, and the number of rows before the first blueprint's."""


def for_blueprints(weights: Mapping[str, Tensor], known: Sequence[str], wanted: Sequence[str]) -> dict[str, Tensor]:
    """Converts weights of a network that learned the blueprints ``known`` to hosts with the blueprints ``wanted``.

    A known name keeps its rows. An unknown one gets the mean of all known rows: its score is then the mean of the known
    scores, and it is planted if that beats the alternatives.

    Raises:
        ValueError: ``known`` and ``wanted`` share no name; lists both.
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
