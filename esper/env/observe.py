"""Computes observations, by name, from the state of envs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from esper.env.state import EnvState, Rules
from esper.lifecycle.slots import Floats, Slots
from esper.lifecycle.stage import STAGES
from esper.rewards.terms import rent_rate
from esper.spaces.action import Op
from esper.spaces.observation import HISTORY, ObservationLayout, clamp_pp, symlog


def observe(state: EnvState, rules: Rules, layout: ObservationLayout) -> NDArray[np.float32]:
    """Returns the observations of all envs, float32 [E, size]."""
    return layout.vectors(_base(state, rules), _slots(state.slots, rules))


def _base(state: EnvState, rules: Rules) -> dict[str, Floats]:
    slots, config, horizon = state.slots, rules.config, rules.horizon
    in_stds, baseline_loss = rules.baseline.in_stds, rules.baseline_loss_at(state.epoch)
    weighted = (slots.alpha * slots.parameters).sum(axis=1)
    values = {
        "epoch": state.epoch / horizon,
        "epochs_left": symlog(np.float64(horizon) - state.epoch),
        "train_loss": symlog(state.train_loss),
        "validation_loss": symlog(state.loss),
        "train_accuracy": state.train_accuracy / 100,
        "validation_accuracy": state.accuracy / 100,
        "best_accuracy": state.best_accuracy / 100,
        "epochs_since_best": state.epochs_since_best / horizon,
        "last_op_succeeded": state.succeeded,
        "rolled_back": state.rolled_back,
        "host_parameters": np.log1p(rules.host_parameters) / 10,
        "added_parameters": slots.parameters.sum(axis=1) / rules.budget,
        "fossil_parameters": np.where(slots.fossil, slots.parameters, 0).sum(axis=1) / rules.budget,
        "rent": rent_rate(weighted, rules.host_parameters, config.reward),
        "seeds_left": 1 - slots.living.sum(axis=1) / config.env.max_seeds,
        "committed_accuracy": state.committed / 100,
        "all_off_accuracy": state.all_off / 100,
        "baseline_accuracy": rules.baseline_at(state.epoch) / 100,
        "baseline_next": rules.baseline_at(state.epoch, ahead=1) / 100,
        "loss_lead": symlog(baseline_loss - in_stds(state.loss)),
        "committed_loss_lead": symlog(baseline_loss - in_stds(state.committed_loss)),
        "all_off_loss_lead": symlog(baseline_loss - in_stds(state.all_off_loss)),
        "baseline_loss": symlog(baseline_loss),
        "baseline_loss_next": symlog(rules.baseline_loss_at(state.epoch, ahead=1)),
        "rollbacks": state.rollbacks / config.governor.max_rollbacks,
        "anomaly_pending": state.anomaly_pending,
        "potential": state.potential,
    }
    losses, accuracies = symlog(state.loss_ago), state.accuracy_ago / 100
    for i in range(HISTORY):
        values[f"loss_{i + 1}_ago"] = losses[:, i]
        values[f"accuracy_{i + 1}_ago"] = accuracies[:, i]
    for stage in STAGES:
        values[f"count_{stage.name.lower()}"] = (slots.stage == stage).mean(axis=1)
    for op in Op:
        values[f"last_op_{op.name.lower()}"] = state.last_op == op
    return values


def _slots(slots: Slots, rules: Rules) -> dict[str, Floats]:
    horizon, holding = rules.horizon, slots.steady
    return {
        **{f"stage_{stage.name.lower()}": slots.stage == stage for stage in STAGES},
        "alpha": slots.alpha,
        "alpha_target": slots.alpha_target,
        "alpha_mode": np.where(holding, 0.0, np.copysign(1.0, slots.alpha_target - slots.alpha_start)),
        "alpha_progress": np.where(holding, 1.0, slots.alpha_done / np.maximum(slots.alpha_steps, 1)),
        "alpha_velocity": slots.alpha_velocity,
        "incubation_target": slots.incubation_target,
        "trial": clamp_pp(slots.trial),
        "trial_error": clamp_pp(slots.trial_error),
        "contribution": clamp_pp(slots.contribution),
        "contribution_change": clamp_pp(slots.contribution_change),
        "contribution_error": clamp_pp(slots.contribution_error),
        "contribution_measured": ~np.isnan(slots.contribution),
        "epochs_since_measured": slots.epochs_since_measured / horizon,
        "interaction": clamp_pp(slots.interaction),
        # The layout replaces NaN (not measured) by 0.
        "gradient_norm": symlog(slots.gradient_norm),
        "gradient_ratio": symlog(slots.gradient_ratio),
        "gradient_health": slots.gradient_health,
        "vanishing": slots.vanishing,
        "exploding": slots.exploding,
        "epochs_in_stage": slots.epochs_in_stage / horizon,
        "age": slots.age / horizon,
        "parameters": np.log1p(slots.parameters) / 10,
        "gate_score": slots.gate_score,
        "gate_passed": slots.gate_passed,
        "fading": slots.fading,
        "blueprint": 1.0 + slots.blueprint,
    }
