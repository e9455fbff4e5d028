"""Measurements: a host's validation and gradient statistics enter the arrays; every measured number is defined here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from esper.attribution.counterfactual import ALL_OFF, CounterfactualHelper
from esper.config import GateConfig
from esper.env.state import EnvState
from esper.lifecycle.slots import Slots
from esper.lifecycle.stage import SeedStage
from esper.seeds.site import Role
from esper.training.host_training import HOST
from esper.training.metrics import GradientSummary


def role_of(stage: int, alpha: float) -> Role:
    """Returns what a seed in this stage does in training."""
    if stage == SeedStage.TRAINING:
        return Role.INCUBATING
    if stage == SeedStage.FOSSILIZED:
        return Role.FOSSIL
    return Role.BLENDED if stage in (SeedStage.BLENDING, SeedStage.HOLDING) and alpha > 0 else Role.ABSENT


def record_validation(state: EnvState, row: int, results: CounterfactualHelper) -> None:
    """Writes accuracy (pp) and loss of the three networks that an epoch validates; NaN for one that is not."""
    for accuracy, loss, name in (
        (state.accuracy, state.loss, results.all_on),
        (state.committed, state.committed_loss, results.committed),
        (state.all_off, state.all_off_loss, ALL_OFF),
    ):
        known = results.measured(name)
        accuracy[row], loss[row] = (results.accuracy(name), results.loss_of(name)) if known else (math.nan, math.nan)


def record_seeds(
    slots: Slots,
    row: int,
    names: Sequence[str],
    results: CounterfactualHelper,
    summaries: Mapping[str, GradientSummary],
    config: GateConfig,
) -> None:
    """Writes what was measured of the seeds in slots ``names``, in the order of the arrays.

    ``summaries`` are those of the epoch's gradients, by slot and ``HOST``.
    """
    host, decay = summaries.get(HOST), config.gradient_ratio_decay
    for s, name in enumerate(names):
        at, mine = (row, s), summaries.get(name)
        if mine is not None and host is not None:
            ratio, old = mine.ratio_to(host), float(slots.gradient_ratio[at])
            if math.isfinite(ratio):
                slots.gradient_ratio[at] = ratio if math.isnan(old) else decay * old + (1 - decay) * ratio
            slots.gradient_norm[at] = mine.norm
            slots.gradient_health[at] = mine.health_by(config.vanishing_weight, config.exploding_weight)
            slots.vanishing[at], slots.exploding[at] = mine.vanishing, mine.exploding
        _record_contribution(slots, at, name, results)


def _record_contribution(slots: Slots, at: tuple[int, int], name: str, results: CounterfactualHelper) -> None:
    trial, contribution = results.trial_of(name), results.contribution(name)
    if trial is not None:
        slots.trial[at], slots.trial_error[at] = trial.difference, trial.error
    before = float(slots.contribution[at])
    slots.epochs_since_measured[at] += not math.isnan(before)
    if contribution is not None:
        slots.contribution_change[at] = contribution.difference - (0.0 if math.isnan(before) else before)
        slots.contribution[at], slots.contribution_error[at] = contribution.difference, contribution.error
        slots.epochs_since_measured[at] = 0
    elif results.lean:  # nothing measures it again, and an old number would be taken for the present one
        slots.contribution[at] = slots.contribution_error[at] = math.nan
        slots.contribution_change[at] = slots.epochs_since_measured[at] = 0
    interaction = results.interaction(name)
    if interaction is not None:
        slots.interaction[at] = interaction
    elif results.lean:
        slots.interaction[at] = math.nan
