"""Computes observations, by name, from the state of envs."""

from __future__ import annotations

import numpy as np

from esper.core.action import Op
from esper.core.arrays import Float32s
from esper.core.observation import KINDS, SLOPES, ObservationLayout, clamp_pp, symlog
from esper.core.reward_terms import RewardState, rent_rate
from esper.core.slots import Floats, Ints
from esper.core.stage import STAGES
from esper.core.state import MIN_LOSS, EnvState, EpisodeRules, by_env

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
) -> Float32s:
    """Returns the observations of all envs, float32 [E, size]; ``seen`` is what rewards read of the same state."""
    base = {
        **_known(state, rules),
        **_measured(state, rules),
        **_grown(state, seen, rules),
    }
    return layout.vectors(base, _slots(state, rules), _choices(rules))


def _known(
    state: EnvState,
    rules: EpisodeRules,
) -> dict[str, Floats]:
    """Returns what is known of the training before its first epoch, for the host as it is now."""
    setting = rules.setting
    first = rules.choices.host_parameters
    parameters = first + state.slots.merged_parameters.sum(axis=1)
    left = np.asarray(rules.horizon, dtype=np.float64) - state.epoch
    per_parameter = setting.samples / parameters
    return {
        "epoch": state.epoch / rules.horizon,
        "epochs_left": symlog(left),
        "edits_left": np.maximum(1 - state.edits / rules.config.env.edits_per_epoch, 0),
        "epochs": _log2(rules.horizon) / 10,
        "updates_left": np.log2(1 + setting.updates * left) / 10,
        "updates_known": np.asarray(setting.updates) > 0,
        "samples": _log2(setting.samples) / 10,
        "samples_per_parameter": _log2(per_parameter) / 10,
        "samples_known": np.asarray(setting.samples) > 0,
        "host_parameters": _log2(parameters) / 10,
        "first_parameters": _log2(first) / 10,
        "host_flops": np.log2(1 + np.asarray(rules.choices.host_flops, dtype=np.float64)) / 20,
        "inputs": _log2(setting.inputs) / 10,
        "classes": _log2(setting.classes) / 10,
        "chance_known": np.asarray(setting.classes) > 1,
        "learning_rate": _log2(setting.learning_rate) / 10,
        "price": symlog(rules.price_of_doubling),
    }


def _log2(x: Floats | Ints | float) -> Floats:
    """Returns the binary logarithm, and 0 for what is unknown, 0."""
    values = np.asarray(x, dtype=np.float64)
    return np.log2(np.where(values > 0, values, 1.0))


def _measured(
    state: EnvState,
    rules: EpisodeRules,
) -> dict[str, Floats]:
    """Returns losses, accuracies and how they change."""
    chance = rules.chance(state.first_loss)
    start = np.maximum(np.abs(state.first_loss), MIN_LOSS)
    trained = state.train_measured
    values = {
        "train_loss": symlog(state.train_loss / chance),
        "train_loss_left": symlog(state.train_loss / start),
        "train_accuracy": state.train_accuracy / 100,
        "train_measured": trained,
        "validation_loss": symlog(state.loss / chance),
        "validation_loss_left": symlog(state.loss / start),
        "validation_accuracy": state.accuracy / 100,
        "loss_gap": np.where(
            trained,
            symlog((state.loss - state.train_loss) / chance),
            0.0,
        ),
        "accuracy_gap": np.where(
            trained,
            (state.train_accuracy - state.accuracy) / 100,
            0.0,
        ),
        "best_accuracy": state.best_accuracy / 100,
        "epochs_since_best": state.epochs_since_best / rules.horizon,
        "committed_accuracy": state.committed / 100,
        "committed_loss": symlog(state.committed_loss / chance),
        "all_off_accuracy": state.all_off / 100,
        "all_off_loss": symlog(state.all_off_loss / chance),
    }
    for epochs in SLOPES:
        ago = epochs - 1
        values[f"loss_slope_{epochs}"] = symlog((state.loss - state.loss_ago[:, ago]) / chance / epochs)
        values[f"accuracy_slope_{epochs}"] = (state.accuracy - state.accuracy_ago[:, ago]) / 100 / epochs
    return values


def _grown(
    state: EnvState,
    seen: RewardState,
    rules: EpisodeRules,
) -> dict[str, Floats]:
    """Returns what has grown, what it costs, and how the last action and the governor went."""
    slots = state.slots
    config = rules.config
    added_flops = rules.added_flops(slots)
    values = {
        "gates_passed": slots.gate_passed.mean(axis=1),
        "last_op_succeeded": state.succeeded,
        "rolled_back": state.rolled_back,
        "added_parameters": slots.added_parameters / rules.budget,
        "fossil_parameters": seen.fossil_parameters / rules.budget,
        "added_flops": np.log1p(rules.choices.in_hosts(added_flops)),
        "rent": rent_rate(seen.weighted_share, config.reward),
        "seeds_left": 1 - slots.living.sum(axis=1) / config.env.max_seeds,
        "rollbacks": state.rollbacks / config.governor.max_rollbacks,
        "anomaly_pending": state.anomaly_pending,
    }
    for stage in STAGES:
        values[f"count_{stage.name.lower()}"] = (slots.stage == stage).mean(axis=1)
    for op in Op:
        values[f"last_op_{op.name.lower()}"] = state.last_op == op
    return values


def _slots(
    state: EnvState,
    rules: EpisodeRules,
) -> dict[str, Floats]:
    slots = state.slots
    steady = slots.steady
    widths = rules.present.widths
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
        "width": _log2(widths) / 10,
        "width_ratio": _log2(widths) - _log2(rules.choices.widths),
        "need": slots.need / rules.chance(state.first_loss)[:, None],
        "need_measured": ~np.isnan(slots.need),
        "merges": np.log2(1 + slots.merges),
        "since_merge": np.where(
            slots.merges > 0,
            (state.epoch[:, None] - slots.last_merge) / by_env(rules.horizon, slots.alpha),
            0.0,
        ),
        "merge_gain": clamp_pp(state.accuracy[:, None] - slots.accuracy_at_merge),
        "blueprint": 1.0 + slots.blueprint,
    }
    for stage in STAGES:
        values[f"stage_{stage.name.lower()}"] = slots.stage == stage
    for name in AS_THEY_ARE:
        values[name] = getattr(slots, name)
    for name in EPOCHS:
        values[name] = getattr(slots, name) / by_env(rules.horizon, slots.alpha)
    for name in PERCENTAGE_POINTS:
        values[name] = clamp_pp(getattr(slots, name))
    return values


def _choices(rules: EpisodeRules) -> dict[str, Floats]:
    """Returns the entries of each (slot, blueprint), [E, S, B] or broadcast to that."""
    choices = rules.present
    price = rules.price(choices.parameters, choices.flops)
    values = {
        "price": symlog(price),
        "size": np.log1p(choices.parameters) / 10,
        "size_share": np.log1p(choices.parameters / by_env(choices.host_parameters, choices.parameters)),
        "flops_share": np.log1p(choices.in_hosts(choices.flops)),
    }
    for place, kind in enumerate(KINDS):
        values[kind] = choices.kinds[..., None, :, place]
    return values
