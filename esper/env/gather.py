"""Gathers the state of training hosts into the arrays of a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from esper.env.apply import next_gate
from esper.env.episode import Episode
from esper.env.fleet import NAN, Fleet, Ints, Slots
from esper.seeds.blend import gate_parameters
from esper.seeds.blueprints import BlueprintRegistry
from esper.seeds.gate import GateResult
from esper.seeds.slot import SeedSlot
from esper.spaces.action import ActionSpec
from esper.spaces.observation import HISTORY
from esper.training.host_training import HostTraining


def gather(episodes: Sequence[Episode]) -> Fleet:
    """Returns the current state of all envs; the potential, which the reward owns, is 0."""
    fleet = Fleet.fresh(len(episodes), slots=_slots(episodes))
    for e, episode in enumerate(episodes):
        now, signals = episode.measurement, episode.signals
        fleet.epoch[e] = episode.epoch
        fleet.train_loss[e], fleet.train_accuracy[e] = now.train_loss, now.train_accuracy
        fleet.loss[e], fleet.accuracy[e] = now.loss, now.accuracy
        fleet.committed[e], fleet.all_off[e] = now.committed, now.all_off
        fleet.committed_loss[e], fleet.all_off_loss[e] = now.committed_loss, now.all_off_loss
        fleet.loss_ago[e] = [signals.ago(signals.losses, i + 1) for i in range(HISTORY)]
        fleet.accuracy_ago[e] = [signals.ago(signals.accuracies, i + 1) for i in range(HISTORY)]
        fleet.best_accuracy[e], fleet.epochs_since_best[e] = signals.best_accuracy, signals.epochs_since_best
        fleet.last_op[e], fleet.succeeded[e] = episode.outcome.op, episode.outcome.succeeded
        fleet.rolled_back[e], fleet.rollbacks[e] = episode.rolled_back, episode.governor.rollbacks
        fleet.anomaly_pending[e] = episode.governor.anomaly_pending
    return fleet


def _slots(episodes: Sequence[Episode]) -> Slots:
    slots = Slots.fresh(len(episodes), len(episodes[0].slots))
    for e, episode in enumerate(episodes):
        for s, slot in enumerate(episode.slots):
            for name, value in _slot(slot, next_gate(episode, slot), episode.world.spec).items():
                getattr(slots, name)[e, s] = value
    return slots


def _slot(slot: SeedSlot, gate: GateResult | None, spec: ActionSpec) -> dict[str, Any]:
    alpha, measured = slot.alpha, asdict(slot.measured)
    return {
        "stage": slot.stage,
        "epochs_in_stage": slot.epochs_in_stage,
        "age": slot.age,
        "alpha": alpha.alpha,
        "alpha_start": alpha.start,
        "alpha_target": alpha.target,
        "alpha_steps": alpha.steps,
        "alpha_done": alpha.done,
        "alpha_velocity": alpha.velocity,
        "incubation_target": slot.incubation_target,
        "fading": slot.fading,
        "blueprint": spec.blueprints.index(slot.blueprint.name) if slot.blueprint else -1,
        "parameters": slot.parameters,
        **{name: NAN if value is None else value for name, value in measured.items()},
        "gate_score": gate.score if gate else 0.0,
        "gate_passed": gate is not None and gate.passed,
    }


def largest_sizes(training: HostTraining, spec: ActionSpec, blueprints: BlueprintRegistry) -> Ints:
    """Returns the number of parameters of each blueprint in each slot with its largest blend style, [S, B].

    The gated style is the largest, so a blueprint that is affordable is so in any style.
    """
    topology = training.host.topology
    recipes = [blueprints.get(topology, name) for name in spec.blueprints]
    channels = [training.slot_by_name[name].site.channels for name in spec.slots]
    return np.array([[recipe.parameters(c) + gate_parameters(c) for recipe in recipes] for c in channels])
