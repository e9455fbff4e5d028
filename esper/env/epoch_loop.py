"""The phases of one epoch, for all hosts together: act, train, measure, govern, tick, and the end of episodes.

The same loop runs hosts in training and simulated ones, hosts left alone for a baseline, and hosts with a fixed
architecture; they differ in their backend (:class:`esper.env.backend.Backend`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from esper.config import Durations, TrainingConfig
from esper.env.backend import Backend
from esper.env.reporting import Occupancy, Reporter
from esper.env.state import EnvState
from esper.lifecycle import transitions
from esper.lifecycle.gates import Gates, open_automatic_gates
from esper.lifecycle.slots import Bools, Floats, Slots
from esper.spaces.action import ALPHA_SPEEDS, ALPHA_TARGETS, HEADS, TEMPOS, Op
from esper.telemetry.span import Spans

Actions = NDArray[np.int64]
_TEMPOS, _TARGETS, _SPEEDS = np.array(TEMPOS), np.array(ALPHA_TARGETS), np.array(ALPHA_SPEEDS)


class EpochLoop:
    """Advances E hosts with S slots by one epoch at a time.

    Args:
        hosts: what is trained and measured.
        config: gates, durations and the conditions that end an episode early.
        horizons: number of epochs in an episode, of each env.
        slots: number of slots of a host.
        reporter: turns what happens into events; None for no events.
        spans: times the phases.
    """

    def __init__(
        self,
        hosts: Backend,
        config: TrainingConfig,
        horizons: Sequence[int],
        slots: int,
        reporter: Reporter | None,
        spans: Spans,
    ) -> None:
        self.hosts, self.config, self.reporter, self.spans = hosts, config.env, reporter, spans
        self.max_rollbacks = config.governor.max_rollbacks
        self.horizons = np.array(horizons)
        durations = {horizon: Durations.of(config, horizon) for horizon in horizons}
        self.durations = durations[horizons[0]]
        self.plateau_epochs = np.array([durations[horizon].plateau_epochs for horizon in horizons])
        self.state = EnvState.fresh(len(horizons), slots=Slots.fresh(len(horizons), slots))
        self.best_by_epoch = np.zeros((len(horizons), max(horizons) + 1))
        """[E, T + 1]: the best accuracy measured until each epoch, by which a plateau is recognised."""

    def begin(self, starting: Bools, run_seed: int) -> None:
        """Starts the next episode of the envs in ``starting`` bool [E] with new hosts, and validates these."""
        state = self.state
        state.clear(starting, keep=("episode",))
        state.episode += starting
        self.hosts.reset(starting, run_seed, state.episode)
        state.slots.clear(starting)
        state.done[starting] = False
        with self.spans("validate"):
            self.hosts.measure(starting, state)
        self.hosts.begin(starting, state)
        for history, now in ((state.loss_ago, state.loss), (state.accuracy_ago, state.accuracy)):
            np.copyto(history, now[:, None], where=starting[:, None])
        np.copyto(state.best_accuracy, state.accuracy, where=starting)
        self.best_by_epoch[starting, 0] = state.accuracy[starting]
        self._gates().judge()

    def step(self, actions: Actions) -> None:
        """Runs one epoch of every env whose episode has not ended, with legal ``actions`` int64 [E, 8]."""
        self.act(actions)
        with self.spans("train"):
            self.hosts.train(~self.state.done, self.state)
        self.conclude()

    def act(self, actions: Actions) -> None:
        """Begins an epoch: applies legal ``actions`` int64 [E, 8]. Training follows."""
        with self.spans("decide"):
            self._act(actions, ~self.state.done)

    def conclude(self) -> None:
        """Ends an epoch after training: validates, governs, and advances all clocks."""
        state, active = self.state, ~self.state.done
        state.epoch += active
        self._shift_history(active)
        with self.spans("validate"):
            self.hosts.measure(active, state)
        with self.spans("govern"):
            removed = self.hosts.govern(active, state)
        with self.spans("decide"):
            self._tick(active, removed)
            self._record(active)
            self._end(active)

    def wait(self) -> None:
        """Runs one epoch in which nothing is done to any slot."""
        self.step(np.full((len(self.horizons), len(HEADS)), Op.WAIT, dtype=np.int64))

    def _act(self, actions: Actions, active: Bools) -> None:
        """Applies the actions; an ADVANCE or FOSSILIZE that its gate refuses changes nothing."""
        op, slot, blueprint, style, tempo, target, speed, curve = (actions[:, i, None] for i in range(len(HEADS)))
        state, slots = self.state, self.state.slots
        chosen = (slot == np.arange(slots.stage.shape[1])) & active[:, None]
        state.rolled_back[active] = False
        refused = ((op == Op.ADVANCE) | (op == Op.FOSSILIZE)) & chosen & ~slots.gate_passed
        gates = self.reporter.explain(state, self._gates(), actions, active) if self.reporter else {}
        before = Occupancy.of(slots)
        germinates = chosen & (op == Op.GERMINATE)
        sizes, failures = self.hosts.plant(germinates, blueprint, style)
        refused[list(failures)] |= germinates[list(failures)]
        does = {kind: chosen & (op == kind) & ~refused for kind in Op}
        transitions.germinate(slots, does[Op.GERMINATE], blueprint, style, _TEMPOS[tempo], _TARGETS[target], sizes)
        transitions.advance(slots, does[Op.ADVANCE])
        transitions.fossilize(slots, does[Op.FOSSILIZE])
        transitions.set_alpha_target(slots, does[Op.SET_ALPHA_TARGET], _TARGETS[target], _SPEEDS[speed], curve)
        transitions.prune(slots, does[Op.PRUNE], _SPEEDS[speed], curve)
        self.hosts.drop(before.removed(slots))
        np.copyto(state.last_op, op[:, 0], where=active)
        np.copyto(state.succeeded, ~refused.any(axis=1), where=active)
        if self.reporter is not None:
            self.reporter.acted(state, actions, active, gates, failures, before)

    def _shift_history(self, active: Bools) -> None:
        """Shifts losses and accuracies by one epoch, before the new ones are measured."""
        state, here = self.state, active[:, None]
        for history, now in ((state.loss_ago, state.loss), (state.accuracy_ago, state.accuracy)):
            np.copyto(history, np.column_stack((now, history[:, :-1])), where=here)

    def _tick(self, active: Bools, removed: Bools) -> None:
        """Advances every clock by one epoch and opens automatic gates.

        If the governor ``removed`` a seed in this epoch, the slot's cooldown begins with the next one.
        """
        state, slots, opened = self.state, self.state.slots, []
        before = Occupancy.of(slots)
        transitions.tick(slots, active[:, None] & ~removed, self.durations.embargo)
        ticked = Occupancy.of(slots)
        if self.config.auto_advance:
            opened = open_automatic_gates(self._gates(), self.config, self.durations, active)
        self.hosts.drop(before.removed(slots))
        self._gates().judge()
        if self.reporter is not None:
            self.reporter.ticked(state, opened, before, ticked)

    def _gates(self) -> Gates:
        return Gates(self.state.slots, self.state.anomaly_pending, self.config.gates, self.durations)

    def _record(self, active: Bools) -> None:
        """Keeps the best accuracy so far, the first of equal ones."""
        state = self.state
        better = active & (state.accuracy > state.best_accuracy)
        state.epochs_since_best += active
        state.epochs_since_best[better] = 0
        np.copyto(state.best_accuracy, state.accuracy, where=better)
        rows = np.flatnonzero(active)
        self.best_by_epoch[rows, state.epoch[rows]] = state.best_accuracy[rows]

    def _end(self, active: Bools) -> None:
        """Ends the episodes that are over, and truncates those that ``env.stop_on`` names."""
        state, limits = self.state, self.config.stop_on
        over = active & ((state.epoch >= self.horizons) | (state.rollbacks >= self.max_rollbacks))
        stops = np.zeros_like(active)
        if "divergence" in limits:
            stops |= state.rolled_back
        if "plateau" in limits:
            quiet = ~state.anomaly_pending & ~state.slots.living.any(axis=1)
            stops |= quiet & (self._risen() <= self.config.plateau_margin)
        state.truncated |= active & ~over & stops
        state.done |= over | state.truncated

    def _risen(self) -> Floats:
        """Rise of the best accuracy over the last ``plateau_epochs``, pp [E]; infinite in a shorter episode."""
        before = self.state.epoch - self.plateau_epochs
        earlier = self.best_by_epoch[np.arange(len(before)), np.maximum(before, 0)]
        return np.where(before >= 0, self.state.best_accuracy - earlier, np.inf)
