"""Computes observations, by name, from the state of envs."""

from __future__ import annotations

import numpy as np

from esper.core.action import Op
from esper.core.arrays import Float32s
from esper.core.gather import ERROR, KEPT, MEAN, WORTH, Gatherer
from esper.core.observation import HISTORY, KINDS, ObservationLayout, clamp_pp, symlog
from esper.core.reward_terms import RewardState, rent_price, rent_rate
from esper.core.slots import Floats, Slots
from esper.core.stage import STAGES
from esper.core.state import EnvState, EpisodeRules

# Fields of slots by how they are observed. The layout replaces NaN (not measured) by 0.
AS_THEY_ARE = (
    "alpha",
    "alpha_target",
    "alpha_velocity",
    "incubation_target",
    "fading",
    "gradient_health",
    "vanishing",
    "exploding",
    "gate_score",
    "gate_passed",
)
EPOCHS = ("epochs_since_measured", "epochs_in_stage", "age")
PERCENTAGE_POINTS = (
    "trial",
    "trial_error",
    "interaction",
    "contribution",
    "contribution_change",
    "contribution_error",
)


def observe(
    state: EnvState,
    seen: RewardState,
    rules: EpisodeRules,
    layout: ObservationLayout,
    gatherer: Gatherer,
) -> Float32s:
    """Returns the observations of all envs, float32 [E, size]; ``seen`` is what rewards read of the same state."""
    base = _base(state, seen, rules)
    base["experience"] = np.log1p(gatherer.episodes)
    base["worth_scale"] = symlog(gatherer.scale)
    return layout.vectors(base, _slots(state.slots, rules), _choices(gatherer, rules))


def _base(
    state: EnvState,
    seen: RewardState,
    rules: EpisodeRules,
) -> dict[str, Floats]:
    slots = state.slots
    config = rules.config
    horizon = rules.horizon
    choices = rules.choices
    added_flops = rules.added_flops(slots)
    # Fractions, and logarithms of what has no bound.
    values = {
        "epoch": state.epoch / horizon,
        "epochs_left": symlog(np.float64(horizon) - state.epoch),
        "edits_left": np.maximum(1 - state.edits / config.env.edits_per_epoch, 0),
        "train_loss": symlog(state.train_loss),
        "validation_loss": symlog(state.loss),
        "train_accuracy": state.train_accuracy / 100,
        "validation_accuracy": state.accuracy / 100,
        "best_accuracy": state.best_accuracy / 100,
        "epochs_since_best": state.epochs_since_best / horizon,
        "gates_passed": slots.gate_passed.mean(axis=1),
        "last_op_succeeded": state.succeeded,
        "rolled_back": state.rolled_back,
        "host_parameters": np.log1p(choices.host_parameters) / 10,
        "added_parameters": slots.added_parameters / rules.budget,
        "fossil_parameters": seen.fossil_parameters / rules.budget,
        "host_flops": np.log1p(choices.host_flops) / 20,
        "added_flops": np.log1p(choices.in_hosts(added_flops)),
        "rent": rent_rate(seen.weighted_share, config.reward),
        "seeds_left": 1 - slots.living.sum(axis=1) / config.env.max_seeds,
        "committed_accuracy": state.committed / 100,
        "all_off_accuracy": state.all_off / 100,
        "baseline_accuracy": seen.baseline / 100,
        "baseline_next": rules.baseline_at(state.epoch, ahead=1) / 100,
        "loss_lead": symlog(seen.baseline_loss - seen.loss),
        "committed_loss_lead": symlog(seen.baseline_loss - seen.committed_loss),
        "all_off_loss_lead": symlog(seen.baseline_loss - seen.all_off_loss),
        "baseline_loss": symlog(seen.baseline_loss),
        "baseline_loss_next": symlog(rules.baseline_loss_at(state.epoch, ahead=1)),
        "rollbacks": state.rollbacks / config.governor.max_rollbacks,
        "anomaly_pending": state.anomaly_pending,
        "potential": state.potential,
    }
    losses = symlog(state.loss_ago)
    accuracies = state.accuracy_ago / 100
    for i in range(HISTORY):
        values[f"loss_{i + 1}_ago"] = losses[:, i]
        values[f"accuracy_{i + 1}_ago"] = accuracies[:, i]
    for stage in STAGES:
        values[f"count_{stage.name.lower()}"] = (slots.stage == stage).mean(axis=1)
    for op in Op:
        values[f"last_op_{op.name.lower()}"] = state.last_op == op
    return values


def _slots(slots: Slots, rules: EpisodeRules) -> dict[str, Floats]:
    steady = slots.steady
    direction = np.copysign(1.0, slots.alpha_target - slots.alpha_start)
    progress = slots.alpha_done / np.maximum(slots.alpha_steps, 1)
    flops = rules.present.flops_of(slots)
    values = {
        "gradient_norm": symlog(slots.gradient_norm),
        "gradient_ratio": symlog(slots.gradient_ratio),
        "alpha_mode": np.where(steady, 0.0, direction),
        "alpha_progress": np.where(steady, 1.0, progress),
        "contribution_measured": ~np.isnan(slots.contribution),
        "parameters": np.log1p(slots.parameters) / 10,
        "flops": np.log1p(rules.choices.in_hosts(flops)),
        "blueprint": 1.0 + slots.blueprint,
    }
    for stage in STAGES:
        values[f"stage_{stage.name.lower()}"] = slots.stage == stage
    for name in AS_THEY_ARE:
        values[name] = getattr(slots, name)
    for name in EPOCHS:
        values[name] = getattr(slots, name) / rules.horizon
    for name in PERCENTAGE_POINTS:
        values[name] = clamp_pp(getattr(slots, name))
    return values


def _choices(gatherer: Gatherer, rules: EpisodeRules) -> dict[str, Floats]:
    """Returns the entries of each (slot, blueprint), [E, S, B] or broadcast to that."""
    choices = rules.present
    # In typical worths of the env's experience.
    worths = gatherer.seen / gatherer.scale[:, None, None, None]
    share = rules.share(choices.parameters, choices.flops)
    profit = gatherer.seen[..., WORTH] - rent_price(share, rules.config.reward)
    profit = np.where(choices.parameters > 0, profit, 0.0)  # where a blueprint does not fit, there is nothing to gain
    values = {
        "worth": worths[..., WORTH],
        "profit": profit / gatherer.scale[:, None, None],
        "pays": profit > 0,
        "worth_mean": worths[..., MEAN],
        "worth_error": worths[..., ERROR],
        "kept": np.log1p(gatherer.seen[..., KEPT]),
        "size": np.log1p(choices.parameters) / 10,
        "size_share": np.log1p(choices.parameters / choices.host_parameters),
        "flops_share": np.log1p(choices.in_hosts(choices.flops)),
    }
    values.update(zip(KINDS, choices.kinds.T, strict=True))
    return values
