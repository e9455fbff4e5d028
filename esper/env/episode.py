"""One env's episode: a training host with its slots, governor and counterfactuals, phase by phase.

The vector env calls the phases of a step in order, each for all envs together; an episode does not know other envs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from esper.attribution.counterfactual import ALL_OFF, ALL_ON, COMMITTED, CounterfactualHelper
from esper.env.apply import Outcome, apply_action, automatic_gates
from esper.env.context import RunContext
from esper.env.history import Measurement, ValidationHistory
from esper.ops import grad_stats
from esper.spaces.action import Action, Op
from esper.telemetry.event import Event, GovernorRollback, SeedCut, StageChanged
from esper.training.governor import Governor
from esper.training.host_state import host_state, load_host_state
from esper.training.host_training import HOST, HostTraining
from esper.training.metrics import EpochMetrics
from esper.training.snapshot import ValidationRecord
from esper.training.validate import Evaluation, evaluate


class Episode:
    """The state of one env and the phases of its steps."""

    def __init__(self, training: HostTraining, world: RunContext) -> None:
        self.training = training
        self.world = world
        self.slots = [training.slot_by_name[name] for name in world.spec.slots]
        """Slots in row-major order, as in actions and observations."""
        self.governor = Governor(world.config.governor, training.durations, training.task.classes, world.pinned)
        self.counterfactual = CounterfactualHelper()
        self.signals = ValidationHistory()
        self.done = True

    # Lanes use these to report errors.
    @property
    def index(self) -> int:
        return self.training.index

    @property
    def epoch(self) -> int:
        return self.training.epoch

    @property
    def batch(self) -> int:
        return self.training.batch

    def reset(self, run_seed: int, episode: int) -> None:
        """Starts an episode with a new host; :meth:`validate`, :meth:`read` and :meth:`begin` must follow."""
        self.training.reset(run_seed, episode)
        self.governor.reset()
        self.signals.reset()
        self.outcome = Outcome(Op.WAIT, True, "")
        self.rolled_back = False
        self.done = False
        self.truncated = False
        self.stopped: str | None = None
        """The condition of ``env.stop_on`` that truncated the episode."""
        self.total_reward = 0.0
        self.terms: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state needed to resume between two steps, as plain values and CPU tensors.

        The last validation is not included: it is repeated in every step, and the slots keep its lasting results."""
        return {
            "training": host_state(self.training),
            "governor": self.governor.state_dict(),
            "losses": self.signals.losses[:],
            "accuracies": self.signals.accuracies[:],
            "measurement": asdict(self.measurement),
            "outcome": {**asdict(self.outcome), "op": int(self.outcome.op)},
            "rolled_back": self.rolled_back,
            "done": self.done,
            "truncated": self.truncated,
            "total_reward": self.total_reward,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from ``state``. Raises KeyError or ValueError if it belongs to a different host."""
        self.reset(state["training"]["run_seed"], state["training"]["episode"])
        load_host_state(self.training, state["training"], self.world.blueprints)
        self.governor.load_state_dict(state["governor"], self.training.device)
        self.signals.losses, self.signals.accuracies = list(state["losses"]), list(state["accuracies"])
        self.measurement = Measurement(**state["measurement"])
        self.outcome = Outcome(**{**state["outcome"], "op": Op(state["outcome"]["op"])})
        self.rolled_back, self.done, self.truncated = state["rolled_back"], state["done"], state["truncated"]
        self.total_reward = state["total_reward"]

    def begin(self) -> None:
        """Takes the first snapshot and starts the histories, after the first validation.

        Raises ValueError if the host is not finite before any training, since no snapshot could restore it.
        """
        if self.not_finite:
            raise ValueError(
                f"env {self.index}: the host is not finite before any training (validation loss "
                f"{self.measurement.loss:g}); check its initial weights and the validation data"
            )
        self.governor.start_from(self.measurement.loss)
        self.governor.snapshot_if_due(self.training, self._record(), fossilized=False)
        self.signals.record(self.measurement)

    # Phase 1
    def act(self, action: Action) -> None:
        """Applies one legal action to the slots."""
        self.rolled_back = False
        self.outcome = apply_action(self, action)

    # Phase 2 trains hosts and does not involve episodes.

    # Phase 3, on a lane
    def validate(self) -> None:
        """Evaluates all configurations; results stay on the device, in the env's totals and in ``packed``.

        ``packed`` float64 [1 + S + ...] holds the number of non-finite elements in the weights of host and fossils and
        in the host's buffers, the ``finite`` flags of the slots (row-major), and the gradient statistics.
        """
        env = self.training
        every = self.world.config.env.counterfactual_every
        plan = self.counterfactual.plan(env.slots, costly=env.epoch % every == 0)
        evaluate(env, env.task.validation, plan, env.calibration, env.totals)
        committed = [env.host_group.parameters, *(env.seed_groups[slot.name].parameters for slot in env.fossils())]
        weights = [[p.detach() for p in parameters if p.is_floating_point()] for parameters in committed]
        buffers = [buffer for name, buffer in env.host.named_buffers() if name in env.finite_buffers]
        values = grad_stats([*weights, buffers])
        finite = [slot.finite if slot.finite is not None else torch.ones((), device=env.device) for slot in self.slots]
        self.packed = torch.cat(
            (
                (values.nan + values.inf).sum().view(1),
                torch.stack(finite).double(),  # [S]
                env.collector.packed(),
            )
        )

    def read(self, packed: Tensor, totals: EpochMetrics) -> None:
        """Reads the transferred epoch: ``packed`` float64 and the env's ``totals``, both on the CPU."""
        head, configurations = 1 + len(self.slots), len(self.counterfactual.configurations)
        loss_sum, right, count, _, bad_losses = totals.training.tolist()
        found = Evaluation(totals.stats(configurations), totals.correct(configurations))
        self.counterfactual.record(found.correct.numpy(), found.loss.numpy(), self.training.task.validation.counts)
        self.not_finite = bad_losses + float(packed[0])
        self.finite = [bool(value) for value in packed[1:head].tolist()]
        self.measurement = Measurement(
            train_loss=loss_sum / count if count else 0.0,
            train_accuracy=100 * right / count if count else 0.0,
            loss=self.counterfactual.loss_of(ALL_ON),
            accuracy=self.counterfactual.accuracy(ALL_ON),
            committed=self.counterfactual.accuracy(COMMITTED),
            all_off=self.counterfactual.accuracy(ALL_OFF),
            committed_loss=self.counterfactual.loss_of(COMMITTED),
            all_off_loss=self.counterfactual.loss_of(ALL_OFF),
        )
        # Losses with fossils only and with every seed off enter rewards and the snapshot's record.
        seen = (self.measurement.loss, self.measurement.committed_loss, self.measurement.all_off_loss)
        self.not_finite += sum(not math.isfinite(loss) for loss in seen)
        self._measure_seeds(packed[head:])

    def _measure_seeds(self, packed: Tensor) -> None:
        summaries = self.training.collector.summaries(packed)
        host = summaries.get(HOST)
        fossils = {slot.name for slot in self.training.fossils()}
        decay = self.world.config.env.gates.gradient_ratio_decay
        self.not_finite += sum(s.not_finite for name, s in summaries.items() if name == HOST or name in fossils)
        for slot in self.slots:
            measured, mine = slot.measured, summaries.get(slot.name)
            if mine is not None and host is not None:
                ratio = mine.ratio_to(host)
                old = measured.gradient_ratio
                if math.isfinite(ratio):
                    measured.gradient_ratio = ratio if old is None else decay * old + (1 - decay) * ratio
                measured.gradient_norm, measured.gradient_health = mine.norm, mine.health
                measured.vanishing, measured.exploding = mine.vanishing, mine.exploding
            trial = self.counterfactual.trial_of(slot.name)
            if trial is not None:
                measured.trial, measured.trial_error = trial.difference, trial.error
            contribution = self.counterfactual.contribution(slot.name)
            if measured.contribution is not None:
                measured.epochs_since_measured += 1
            if contribution is not None:
                measured.contribution_change = contribution.difference - (measured.contribution or 0.0)
                measured.contribution, measured.contribution_error = contribution.difference, contribution.error
                measured.epochs_since_measured = 0
            interaction = self.counterfactual.interaction(slot.name)
            if interaction is not None:
                measured.interaction = interaction

    # Phase 4
    def govern(self) -> None:
        """Rolls back a bad host; in a healthy one, cuts non-finite living seeds and takes a snapshot if it is due."""
        env = self.training
        self._with_seed = [slot for slot in self.slots if slot.seed is not None]
        panic = self.governor.check(self.measurement.loss, self.not_finite)
        if panic is None:
            self._cut_broken_seeds()
            fossilized = self.outcome.op is Op.FOSSILIZE and self.outcome.succeeded
            self.governor.snapshot_if_due(env, self._record(), fossilized)
            return
        snapshot = self.governor.roll_back(env)
        self.counterfactual.reset()  # its results are those of the bad network
        self.rolled_back = True
        record = snapshot.record
        self.measurement = Measurement(
            train_loss=self.measurement.train_loss,
            train_accuracy=self.measurement.train_accuracy,
            loss=record.loss,
            accuracy=record.committed,
            committed=record.committed,
            all_off=record.all_off,
            committed_loss=record.loss,
            all_off_loss=record.all_off_loss,
        )
        self._emit(
            GovernorRollback,
            reason=panic.reason,
            value=panic.value,
            threshold=panic.threshold,
            restored_epoch=snapshot.epoch,
            rollbacks=self.governor.rollbacks,
        )

    def _cut_broken_seeds(self) -> None:
        """Cuts non-finite living seeds. The host must be healthy: in a bad one every seed has non-finite inputs."""
        for slot, finite in zip(self.slots, self.finite, strict=True):
            if slot.living and not finite:
                assert slot.blueprint is not None
                self._emit(SeedCut, slot=slot.name, blueprint=slot.blueprint.name)
                slot.cut("not finite")
        self.training.forget_removed_seeds()

    # Phase 5
    def tick(self) -> None:
        """Advances every clock by one epoch and opens automatic gates.

        If the governor removed a seed in this epoch, the slot's cooldown begins with the next one.
        """
        for slot in self.slots:
            if slot.seed is not None or slot not in self._with_seed:
                slot.tick()
        automatic_gates(self)
        self.training.forget_removed_seeds()

    # Phase 6
    def close_epoch(self) -> None:
        """Records the measurement and decides whether the episode ends or is truncated here."""
        self.signals.record(self.measurement)
        self.done = self.epoch >= self.training.horizon or self.governor.ends_episode
        if not self.done:
            self.stopped = self._early_stop()
            self.done = self.truncated = self.stopped is not None

    def _early_stop(self) -> str | None:
        """Returns the condition of ``env.stop_on`` that holds, or None."""
        config = self.world.config.env
        if "divergence" in config.stop_on and self.rolled_back:
            return "divergence"
        if "plateau" in config.stop_on and not self.governor.anomaly_pending:
            growing = any(slot.living for slot in self.slots)
            if not growing and self.signals.risen(self.training.durations.plateau_epochs) <= config.plateau_margin:
                return "plateau"
        return None

    def credit(self, terms: dict[str, float]) -> float:
        """Stores the reward terms of this epoch by name and returns their sum."""
        self.terms = terms
        reward = sum(terms.values())
        self.total_reward += reward
        return reward

    def baseline_accuracy(self) -> float:
        """Returns the no-growth baseline b_t at this epoch, pp."""
        return self.world.baseline.accuracy[self.epoch]

    def report_changes(self) -> None:
        """Emits the stage changes since the last call as events."""
        for change in self.training.take_changes():
            self._emit(
                StageChanged,
                slot=change.slot,
                blueprint=change.blueprint,
                before=change.before.name,
                after=change.after.name,
                cause=change.cause,
            )

    def _emit(self, event: Callable[..., Event], **fields: object) -> None:
        self.world.emit(event(env=self.index, episode=self.training.episode, epoch=self.epoch, **fields))

    def _record(self) -> ValidationRecord:
        m = self.measurement
        return ValidationRecord(m.committed_loss, m.committed, m.all_off, m.all_off_loss)


def transfer(episodes: list[Episode]) -> None:
    """Transfers every env's epoch to the CPU and reads it.

    There are two transfers per device: one of all totals, and one of flags and gradient statistics.
    """
    blocks: dict[int, list[Episode]] = {}
    for episode in episodes:
        blocks.setdefault(id(episode.training.totals.accumulators), []).append(episode)
    for together in blocks.values():
        _transfer_block(together)


def _transfer_block(episodes: list[Episode]) -> None:
    totals = episodes[0].training.totals.accumulators.read()
    packed = torch.cat([episode.packed for episode in episodes]).cpu()
    first = 0
    for episode in episodes:
        last = first + len(episode.packed)
        episode.read(packed[first:last], EpochMetrics(totals, episode.training.totals.place))
        first = last
