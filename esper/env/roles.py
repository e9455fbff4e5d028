"""Roles of seeds in training, which follow from the lifecycle."""

from __future__ import annotations

from collections.abc import Sequence

from esper.lifecycle.slots import Slots
from esper.lifecycle.stage import SeedStage
from esper.seeds.site import Role, Site
from esper.training.snapshot import Restorable


def role_of(stage: int, alpha: float) -> Role:
    """Returns what a seed in this stage does in training."""
    if stage == SeedStage.TRAINING:
        return Role.INCUBATING
    if stage == SeedStage.FOSSILIZED:
        return Role.FOSSIL
    if stage in (SeedStage.BLENDING, SeedStage.HOLDING) and alpha > 0:
        return Role.BLENDED
    return Role.ABSENT


def assign_roles(
    host: Restorable,
    sites: Sequence[Site],
    slots: Slots,
    row: int,
) -> None:
    """Gives the seed of each of ``sites``, in the order of the arrays' slots, the role, alphas and learning flag that
    follow from the lifecycle in ``row``."""
    stages = slots.stage[row].tolist()
    alphas = slots.alpha[row].tolist()
    targets = slots.incubation_target[row].tolist()
    learning = slots.learning[row].tolist()
    for s, site in enumerate(sites):
        if site.seed is not None:
            role = role_of(stages[s], alphas[s])
            host.assign(site, role, alphas[s], targets[s], learning[s])
