"""Measurements: a host's validation and gradient statistics enter the arrays; every measured number is defined here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from esper.attribution.counterfactual import ALL_OFF, CounterfactualHelper
from esper.config import GateConfig
from esper.env.state import EnvState
from esper.lifecycle.slots import Slots
from esper.training.metrics import HOST, GradientSummary


def record_validation(
    state: EnvState,
    row: int,
    results: CounterfactualHelper,
) -> None:
    """Writes accuracy (pp) and loss of the three networks that an epoch validates; NaN for one that is not."""
    for accuracy, loss, network in (
        (state.accuracy, state.loss, results.all_on),
        (state.committed, state.committed_loss, results.committed),
        (state.all_off, state.all_off_loss, ALL_OFF),
    ):
        if results.measured(network):
            accuracy[row] = results.accuracy(network)
            loss[row] = results.loss_of(network)
        else:
            accuracy[row] = math.nan
            loss[row] = math.nan


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
    host = summaries.get(HOST)
    for s, name in enumerate(names):
        seed = summaries.get(name)
        if seed is not None and host is not None:
            _record_gradients(slots, (row, s), seed, host, config)
        _record_contribution(slots, (row, s), name, results)


def _record_gradients(
    slots: Slots,
    at: tuple[int, int],
    seed: GradientSummary,
    host: GradientSummary,
    config: GateConfig,
) -> None:
    ratio = seed.ratio_to(host)
    if math.isfinite(ratio):
        decay = config.gradient_ratio_decay
        before = float(slots.gradient_ratio[at])
        # An exponential moving average, which begins with the first ratio.
        if not math.isnan(before):
            ratio = decay * before + (1 - decay) * ratio
        slots.gradient_ratio[at] = ratio
    slots.gradient_norm[at] = seed.norm
    slots.gradient_health[at] = seed.health_by(config.vanishing_weight, config.exploding_weight)
    slots.vanishing[at] = seed.vanishing
    slots.exploding[at] = seed.exploding


def _record_contribution(
    slots: Slots,
    at: tuple[int, int],
    name: str,
    results: CounterfactualHelper,
) -> None:
    trial = results.trial_of(name)
    if trial is not None:
        slots.trial[at] = trial.difference
        slots.trial_error[at] = trial.error

    contribution = results.contribution(name)
    before = float(slots.contribution[at])
    if not math.isnan(before):
        slots.epochs_since_measured[at] += 1
    if contribution is not None:
        # The first contribution is a change from 0.
        change = contribution.difference
        if not math.isnan(before):
            change -= before
        slots.contribution_change[at] = change
        slots.contribution[at] = contribution.difference
        slots.contribution_error[at] = contribution.error
        slots.epochs_since_measured[at] = 0
    elif results.lean:  # nothing measures it again, and an old number would be taken for the present one
        slots.contribution[at] = math.nan
        slots.contribution_error[at] = math.nan
        slots.contribution_change[at] = 0
        slots.epochs_since_measured[at] = 0

    interaction = results.interaction(name)
    if interaction is not None:
        slots.interaction[at] = interaction
    elif results.lean:
        slots.interaction[at] = math.nan
