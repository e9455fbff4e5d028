"""The phase loop: decisions for all hosts and their epochs, from the actions to the end of episodes.

The same loop runs hosts in training and simulated ones, hosts left alone for a baseline, and hosts with a fixed
architecture; they differ in their :class:`esper.env.backend.Backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from esper.config import Durations, TrainingConfig
from esper.core import transitions
from esper.core.action import ALPHA_SPEEDS, ALPHA_TARGETS, HEADS, TEMPOS, ActionSpec, Op
from esper.core.gates import Gates, open_automatic_gates
from esper.core.ramps import STYLE_ADDED
from esper.core.slots import Bools, Floats, Slots
from esper.core.stage import SeedStage
from esper.core.state import EnvState
from esper.env.backend import Backend, Merge, Release, take_out
from esper.env.reporting import Reporter
from esper.telemetry.event import Event
from esper.telemetry.span import Spans

Actions = NDArray[np.int64]

# Values of heads by the indices of actions.
_TEMPOS = np.array(TEMPOS)
_TARGETS = np.array(ALPHA_TARGETS)
_SPEEDS = np.array(ALPHA_SPEEDS)


class EpochLoop:
    """Applies decisions to E hosts with S slots, and advances those that train by an epoch.

    Args:
        backend: the hosts.
        horizons: number of epochs in an episode, by env.
        spec: names of slots and blueprints.
        spans: times the phases.
        emit: receives events of what happens; None for none.
    """

    def __init__(
        self,
        backend: Backend,
        config: TrainingConfig,
        horizons: Sequence[int],
        spec: ActionSpec,
        spans: Spans,
        emit: Callable[[Event], None] | None = None,
    ) -> None:
        envs = len(horizons)
        self.backend = backend
        self.config = config.env
        self.spans = spans
        self.max_rollbacks = config.governor.max_rollbacks
        self.horizons = np.array(horizons)
        # Horizons differ only between hosts that are left alone, which have no gates.
        durations = [Durations.of(config, horizon) for horizon in horizons]
        self.durations = durations[0]
        self.plateau_epochs = np.array([of_env.plateau_epochs for of_env in durations])
        self.state = EnvState.fresh(envs, slots=Slots.fresh(envs, len(spec.slots)))
        self.reporter = None
        if emit is not None:
            self.reporter = Reporter(emit, spec, config, self.state)
        self.best_by_epoch = np.zeros((envs, max(horizons) + 1))
        """[E, T + 1]: the best accuracy measured until each epoch, by which a plateau is recognised."""
        self.released: dict[int, Release] = {}
        """The units that the last actions have taken out of layers, by env."""
        self.joined: dict[int, Merge] = {}
        """Widenings that became a part of layers before the last epoch was trained, by env."""

    def step(self, actions: Actions) -> Bools:
        """Applies legal ``actions`` int64 [E, 8] in the envs whose episode has not ended, and runs an epoch of those
        that train; returns them, bool [E], see :meth:`begin_epoch`."""
        trains = self.begin_epoch(actions)
        if trains.any():
            self.join(trains)
            with self.spans("train"):
                self.backend.train(trains, self.state)
            self.finish_epoch(trains)
        return trains

    def begin_epoch(self, actions: Actions) -> Bools:
        """Applies legal ``actions`` int64 [E, 8]; returns the envs, bool [E], that train now: those that WAIT, and
        those that have used their last edit. In the others all clocks stand still.

        The two halves are separate because ``esper.Grower`` leaves the training between them to the user's loop.
        """
        state = self.state
        active = ~state.done
        edits = active & (actions[:, 0] != Op.WAIT)
        with self.spans("decide"):
            self._apply(actions, active)
            state.edits += edits
            used_up = state.edits >= self.config.edits_per_epoch
            trains: Bools = active & (~edits | used_up)
            state.trained[:] = trains
            state.write(trains, rolled_back=False)
            waiting = active & ~trains
            if waiting.any():  # what the next mask and observation show
                self._gates().update()
        return trains

    def finish_epoch(self, active: Bools) -> None:
        """Ends an epoch of the envs of ``active`` bool [E] after training: validates, governs, and advances all
        clocks."""
        state = self.state
        state.epoch += active
        state.write(active, edits=0)
        state.slots.write(active[:, None], edited=False)
        self._shift_history(active)
        with self.spans("validate"):
            self.backend.measure(active, state)
        # The governor judges what was just measured, and a rollback replaces it.
        with self.spans("govern"):
            removed = self._govern(active)
        with self.spans("decide"):
            self._tick(active, removed)
            self._note_best(active)
            self._end(active)

    def merge(self) -> dict[int, Merge]:
        """Frees the slots of fossils that have trained for an epoch and can become a part of their hosts' layers, in
        the envs whose last step trained one.

        While an anomaly is pending, a host stays as it is. Returns what was merged, by env.
        """
        return _merge(self, self.state.slots.epochs_in_stage > 0)

    def join(self, trains: Bools) -> None:
        """Merges seeds of the envs ``trains`` bool [E] that are a part of their hosts at once, before the first epoch,
        so that their layers train from the first step as layers of that width do."""
        slots = self.state.slots
        first = trains & (self.state.epoch == 0)
        self.joined = _merge(self, self.backend.at_once[slots.blueprint] & first[:, None])

    def without_growth(self, run_seed: int) -> Iterator[EnvState]:
        """Runs an episode of each host that is left alone; yields the state after each validation, also the first."""
        self.start(np.ones_like(self.state.done), run_seed)
        yield self.state
        shape = (len(self.horizons), len(HEADS))
        waits = np.full(shape, Op.WAIT, dtype=np.int64)
        while not self.state.done.all():
            self.step(waits)
            yield self.state

    def start(self, starting: Bools, run_seed: int) -> None:
        """Starts the next episode of the envs in ``starting`` bool [E] with new hosts, and validates these."""
        state = self.state
        state.clear(starting, keep=("episode",))
        state.slots.clear(starting)
        state.write(starting, episode=state.episode + 1, done=False)

        self.backend.reset(starting, run_seed, state.episode)
        with self.spans("validate"):
            self.backend.measure(starting, state)
        self.backend.take_first_snapshots(starting, state)

        # The history before the first epoch is the first measurement.
        state.write(
            starting[:, None],
            loss_ago=state.loss[:, None],
            accuracy_ago=state.accuracy[:, None],
        )
        state.write(starting, best_accuracy=state.accuracy, first_loss=state.loss)
        self.best_by_epoch[starting, 0] = state.accuracy[starting]
        self._gates().update()

    def _apply(self, actions: Actions, active: Bools) -> None:
        """Applies the actions; those refused change nothing: ADVANCE or FOSSILIZE by a gate, GERMINATE by a failure."""
        state = self.state
        slots = state.slots
        # Heads as columns [E, 1], which broadcast over the slots.
        op, slot, blueprint, style, tempo, target, speed, curve = actions.T[:, :, None]
        style = np.where(self.backend.only_added[blueprint], STYLE_ADDED[style], style)
        target_alpha = _TARGETS[target]
        steps = _SPEEDS[speed]

        chosen = (slot == np.arange(slots.stage.shape[1])) & active[:, None]
        gated = (op == Op.ADVANCE) | (op == Op.FOSSILIZE)
        refused = gated & chosen & ~slots.gate_passed
        gates = {}
        if self.reporter is not None:  # before anything changes
            gates = self.reporter.explain(self._gates(), actions, active)
        prunes = chosen & (op == Op.PRUNE)
        shrinks = prunes & (slots.stage == SeedStage.DORMANT)
        self.released = take_out(self.backend, slots, shrinks)
        occupied = slots.occupied

        germinates = chosen & (op == Op.GERMINATE)
        sizes, failures = self.backend.plant(germinates, blueprint, style)
        failed = list(failures)  # rows of envs
        refused[failed] |= germinates[failed]

        does = {kind: chosen & (op == kind) & ~refused for kind in Op}
        # Some seeds are a part of their host at once, and pass no stages.
        joins = does[Op.GERMINATE] & self.backend.at_once[blueprint]
        transitions.join(slots, joins, blueprint, style, sizes)
        transitions.germinate(
            slots,
            does[Op.GERMINATE] & ~joins,
            blueprint,
            style,
            _TEMPOS[tempo],
            target_alpha,
            sizes,
        )
        transitions.advance(slots, does[Op.ADVANCE])
        transitions.fossilize(slots, does[Op.FOSSILIZE])
        transitions.set_alpha_target(
            slots,
            does[Op.SET_ALPHA_TARGET],
            target_alpha,
            steps,
            curve,
        )
        transitions.prune(slots, does[Op.PRUNE], steps, curve)
        self.backend.remove(occupied & ~slots.occupied)

        # Last, because a slot that is planted in or emptied is written as a whole.
        slots.edited |= chosen & (op != Op.WAIT)
        state.write(active, last_op=op[:, 0], succeeded=~refused.any(axis=1))
        if self.reporter is not None:
            self.reporter.acted(actions, active, gates, failures, self.released)

    def _shift_history(self, active: Bools) -> None:
        """Shifts losses and accuracies by one epoch, before the new ones are measured."""
        state = self.state
        state.write(
            active[:, None],
            loss_ago=np.column_stack((state.loss, state.loss_ago[:, :-1])),
            accuracy_ago=np.column_stack((state.accuracy, state.accuracy_ago[:, :-1])),
        )

    def _govern(self, active: Bools) -> Bools:
        """Has hosts rolled back and broken seeds cut; returns the slots [E, S] whose seeds are gone.

        The backend has removed their modules itself: a rollback restores a host as a whole.
        """
        slots = self.state.slots
        occupied = slots.occupied
        if self.reporter is not None:
            self.reporter.look()  # a loop may have been loaded since its last action
        rollbacks = self.backend.govern(active, self.state)
        if self.reporter is not None:
            self.reporter.governed(rollbacks)
        return occupied & ~slots.occupied

    def _tick(self, active: Bools, removed: Bools) -> None:
        """Advances the clocks of these envs by one epoch and opens automatic gates.

        If the governor ``removed`` a seed in this epoch, the slot's cooldown begins with the next one.
        """
        slots = self.state.slots
        occupied = slots.occupied
        transitions.tick(slots, active[:, None] & ~removed, self.durations.embargo)
        if self.reporter is not None:
            self.reporter.changed("cooldown", if_removed="faded")

        opened = []
        if self.config.auto_advance:
            opened = open_automatic_gates(
                self._gates(),
                self.config,
                self.durations,
                active,
            )
        self.backend.remove(occupied & ~slots.occupied)
        # What the next mask and observation show.
        self._gates().update()
        if self.reporter is not None:
            self.reporter.opened(opened)
            self.reporter.changed("automatic", if_removed="stuck in training")

    def _gates(self) -> Gates:
        return Gates(
            self.state.slots,
            self.state.anomaly_pending,
            self.config.gates,
            self.durations,
        )

    def _note_best(self, active: Bools) -> None:
        """Keeps the best accuracy so far; among equal ones, the first."""
        state = self.state
        state.epochs_since_best += active
        better = active & (state.accuracy > state.best_accuracy)
        state.write(better, best_accuracy=state.accuracy, epochs_since_best=0)
        rows = np.flatnonzero(active)
        self.best_by_epoch[rows, state.epoch[rows]] = state.best_accuracy[rows]

    def _end(self, active: Bools) -> None:
        """Ends the episodes that are over, and truncates those that ``env.stop_on`` names."""
        state = self.state
        at_horizon = state.epoch >= self.horizons
        at_last_rollback = state.rollbacks >= self.max_rollbacks
        over = active & (at_horizon | at_last_rollback)

        stops = np.zeros_like(active)
        if "divergence" in self.config.stop_on:
            stops |= state.rolled_back
        if "plateau" in self.config.stop_on:
            quiet = ~state.anomaly_pending & ~state.slots.living.any(axis=1)
            stops |= quiet & (self._risen() <= self.config.plateau_margin)
        # An episode that is over anyway is terminated, not truncated.
        state.truncated |= active & ~over & stops
        state.done |= over | state.truncated

    def _risen(self) -> Floats:
        """Rise of the best accuracy over the last ``plateau_epochs``, pp [E]; infinite in a shorter episode."""
        before = self.state.epoch - self.plateau_epochs
        earlier = self.best_by_epoch[np.arange(len(before)), np.maximum(before, 0)]
        return np.where(before >= 0, self.state.best_accuracy - earlier, np.inf)


def _merge(loop: EpochLoop, where: Bools) -> dict[int, Merge]:
    """Merges the fossils of ``where`` bool [E, S], see :meth:`EpochLoop.merge`."""
    state = loop.state
    slots = state.slots
    ready = state.trained & ~state.done & ~state.anomaly_pending
    due = slots.fossil & where & ready[:, None]
    if not loop.config.merge or not due.any():
        return {}
    merges = loop.backend.merge(due, state)
    where = np.zeros_like(due)
    parameters = np.zeros_like(slots.merged_parameters)
    flops = np.zeros_like(slots.merged_flops)
    for row, merge in merges.items():
        where[row] = merge.slots
        parameters[row] = merge.parameters
        flops[row] = merge.flops
    transitions.merge(
        slots,
        where,
        parameters,
        flops,
        state.epoch[:, None],
        state.accuracy[:, None],
    )
    if merges:
        loop.backend.rebase(np.any(where, axis=1), state)
    if loop.reporter is not None:
        loop.reporter.merged()
    return merges
