"""From an episode to the named values of its observation."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from esper.env.apply import next_gate
from esper.env.episode import Episode
from esper.rewards.terms import rent_rate
from esper.seeds.slot import SeedSlot
from esper.seeds.stage import STAGES
from esper.spaces.action import Op
from esper.spaces.observation import HISTORY, ObservationLayout, clamp_pp, symlog


def observe(episode: Episode, layout: ObservationLayout) -> NDArray[np.float32]:
    """The env's observation [size]."""
    return layout.vector(_base(episode), {slot.name: _slot(episode, slot) for slot in episode.slots})


def _base(episode: Episode) -> dict[str, float]:
    training, signals, now = episode.training, episode.signals, episode.measurement
    env, horizon, slots = episode.world.config.env, training.horizon, episode.slots
    rent = rent_rate(episode.reward_state().weighted_parameters, training.host_parameters, episode.world.config.reward)
    values = {
        "epoch": training.epoch / horizon,
        "train_loss": symlog(now.train_loss),
        "validation_loss": symlog(now.loss),
        "train_accuracy": now.train_accuracy / 100,
        "validation_accuracy": now.accuracy / 100,
        "best_accuracy": signals.best_accuracy / 100,
        "epochs_since_best": signals.epochs_since_best / horizon,
        "last_op_succeeded": float(episode.outcome.succeeded),
        "rolled_back": float(episode.rolled_back),
        "host_parameters": math.log1p(training.host_parameters) / 10,
        "added_parameters": training.seed_parameters / episode.budget,
        "fossil_parameters": training.fossil_parameters / episode.budget,
        "rent": rent,
        "seeds_left": 1 - sum(slot.living for slot in slots) / env.max_seeds,
        "committed_accuracy": now.committed / 100,
        "all_off_accuracy": now.all_off / 100,
        "baseline_accuracy": episode.baseline_accuracy() / 100,
        "baseline_next": episode.baseline_accuracy(ahead=1) / 100,
        "rollbacks": episode.governor.rollbacks / episode.world.config.governor.max_rollbacks,
        "anomaly_pending": float(episode.governor.anomaly_pending),
        "potential": episode.reward.potential,
    }
    for i in range(1, HISTORY + 1):
        values[f"loss_{i}_ago"] = symlog(signals.ago(signals.losses, i))
        values[f"accuracy_{i}_ago"] = signals.ago(signals.accuracies, i) / 100
    for stage in STAGES:
        values[f"count_{stage.name.lower()}"] = sum(slot.stage is stage for slot in slots) / len(slots)
    for op in Op:
        values[f"last_op_{op.name.lower()}"] = float(episode.outcome.op is op)
    return values


def _slot(episode: Episode, slot: SeedSlot) -> dict[str, float]:
    horizon, measured, alpha = episode.training.horizon, slot.measured, slot.alpha
    gate = next_gate(episode, slot)
    blueprints = episode.world.spec.blueprints
    return {
        **{f"stage_{stage.name.lower()}": float(slot.stage is stage) for stage in STAGES},
        "alpha": alpha.alpha,
        "alpha_target": alpha.target,
        "alpha_mode": 0.0 if alpha.holding else math.copysign(1.0, alpha.target - alpha.start),
        "alpha_progress": alpha.progress,
        "alpha_velocity": alpha.velocity,
        "incubation_target": slot.incubation_target,
        "trial": clamp_pp(measured.trial),
        "trial_error": clamp_pp(measured.trial_error),
        "contribution": clamp_pp(measured.contribution),
        "contribution_change": clamp_pp(measured.contribution_change),
        "contribution_error": clamp_pp(measured.contribution_error),
        "contribution_measured": float(measured.contribution is not None),
        "epochs_since_measured": measured.epochs_since_measured / horizon,
        "interaction": clamp_pp(measured.interaction),
        "gradient_norm": symlog(measured.gradient_norm or 0.0),
        "gradient_ratio": symlog(measured.gradient_ratio or 0.0),
        "gradient_health": measured.gradient_health or 0.0,
        "vanishing": measured.vanishing or 0.0,
        "exploding": measured.exploding or 0.0,
        "epochs_in_stage": slot.epochs_in_stage / horizon,
        "age": slot.age / horizon,
        "parameters": math.log1p(slot.parameters) / 10,
        "gate_score": gate.score if gate else 0.0,
        "gate_passed": float(gate.passed) if gate else 0.0,
        "fading": float(slot.fading),
        "blueprint": 1.0 + blueprints.index(slot.blueprint.name) if slot.blueprint else 0.0,
    }
