"""One host in training with its governor and its counterfactuals: what is measured of it, and how it is rolled back."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.attribution.counterfactual import CounterfactualHelper
from esper.env.measurements import record_seeds, record_validation, role_of
from esper.env.state import EnvState
from esper.lifecycle.slots import MEASUREMENTS, Slots
from esper.ops import grad_stats
from esper.spaces.action import Op
from esper.training.governor import Governor
from esper.training.host_training import HOST, HostTraining
from esper.training.metrics import EpochMetrics
from esper.training.snapshot import Snapshot, ValidationRecord
from esper.training.validate import Evaluation, evaluate


class GovernedHost:
    """The host of row ``row`` in the arrays of a vector env.

    Args:
        training: the host with its optimizers.
        governor: watches it.
        slots: names of its slots, in the order of the arrays.
        row: index in the arrays.
    """

    def __init__(self, training: HostTraining, governor: Governor, slots: tuple[str, ...], row: int) -> None:
        self.training, self.governor, self.row = training, governor, row
        self.sites = [training.site_by_name[name] for name in slots]
        """Sites in the order of the arrays' slots."""
        self.counterfactual = CounterfactualHelper()
        self.not_finite = 0.0
        """Number of non-finite values in losses, host and fossils."""
        self.finite: NDArray[np.bool_] = np.ones(len(slots), dtype=np.bool_)
        """[S]: False for a seed that had a non-finite value."""

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

    def assign(self, slots: Slots) -> None:
        """Gives each site the role, the alphas and the learning flag that follow from the lifecycle."""
        stages, learning = slots.stage[self.row].tolist(), slots.learning[self.row].tolist()
        alphas, targets = slots.alpha[self.row].tolist(), slots.incubation_target[self.row].tolist()
        for s, site in enumerate(self.sites):
            if site.seed is not None:
                self.training.assign(site, role_of(stages[s], alphas[s]), alphas[s], targets[s], learning[s])

    def validate(self) -> None:
        """Evaluates all configurations; results stay on the device, in the host's totals and in ``packed``.

        ``packed`` float64 [1 + S + ...] holds the number of non-finite elements in the weights of host and fossils and
        in the host's buffers, the ``finite`` flags of the slots, and the gradient statistics.
        """
        training = self.training
        every = training.config.env.counterfactual_every
        plan = self.counterfactual.plan(training.sites, costly=training.epoch % every == 0)
        evaluate(training, training.task.validation, plan, training.calibration, training.totals)
        fossils = (training.seed_groups[site.name].parameters for site in training.fossils())
        committed = [training.host_group.parameters, *fossils]
        weights = [[p.detach() for p in parameters if p.is_floating_point()] for parameters in committed]
        buffers = [buffer for name, buffer in training.host.named_buffers() if name in training.finite_buffers]
        values = grad_stats([*weights, buffers])
        true = torch.ones((), device=training.device)
        finite = [site.finite if site.finite is not None else true for site in self.sites]
        self.packed = torch.cat(
            (
                (values.nan + values.inf).sum().view(1),
                torch.stack(finite).double(),  # [S]
                training.collector.packed(),
            )
        )

    def read(self, packed: Tensor, totals: EpochMetrics, state: EnvState) -> None:
        """Writes the transferred epoch into ``state``; ``packed`` float64 and the host's ``totals`` are on the CPU."""
        row, head = self.row, 1 + len(self.sites)
        results = self.counterfactual
        configurations = len(results.configurations)
        loss_sum, right, count, _, bad_losses = totals.training.tolist()
        found = Evaluation(totals.stats(configurations), totals.correct(configurations))
        results.record(found.correct.numpy(), found.loss.numpy(), self.training.task.validation.counts)
        state.train_loss[row] = loss_sum / count if count else 0.0
        state.train_accuracy[row] = 100 * right / count if count else 0.0
        record_validation(state, row, results)
        self.finite = packed[1:head].numpy() > 0
        # Losses with fossils only and with every seed off enter rewards and the snapshot's record.
        losses = (state.loss[row], state.committed_loss[row], state.all_off_loss[row])
        self.not_finite = bad_losses + float(packed[0]) + sum(not math.isfinite(loss) for loss in losses)
        summaries = self.training.collector.summaries(packed[head:])
        committed = {HOST, *(site.name for site in self.training.fossils())}
        self.not_finite += sum(summary.not_finite for name, summary in summaries.items() if name in committed)
        names = [site.name for site in self.sites]
        record_seeds(state.slots, row, names, results, summaries, self.training.config.env.gates.gradient_ratio_decay)

    def begin(self, state: EnvState) -> None:
        """Takes the first snapshot, after the first validation.

        Raises ValueError if the host is not finite before any training, since no snapshot could restore it.
        """
        loss = float(state.loss[self.row])
        if self.not_finite:
            raise ValueError(
                f"env {self.index}: the host is not finite before any training (validation loss {loss:g}); check its "
                "initial weights and the validation data"
            )
        self.governor.start_from(loss)
        self.keep(state)

    def keep(self, state: EnvState) -> None:
        """Takes a snapshot of the healthy host if one is due."""
        row = self.row
        record = ValidationRecord(*(float(values[row]) for values in _recorded(state)))
        measured = {
            site.name: {name: values.item() for name, values in _measurements(state.slots, row, s).items()}
            for s, site in enumerate(self.sites)
            if site.fossil
        }
        fossilized = state.last_op[row] == Op.FOSSILIZE and bool(state.succeeded[row])
        self.governor.snapshot_if_due(self.training, record, measured, fossilized)

    def roll_back(self, state: EnvState) -> Snapshot:
        """Restores a snapshot, and what was measured of the committed network then."""
        row, snapshot = self.row, self.governor.roll_back(self.training)
        self.counterfactual.reset()  # its results are those of the bad network
        record, slots = snapshot.record, state.slots
        state.accuracy[row] = state.committed[row] = record.committed
        state.loss[row] = state.committed_loss[row] = record.loss
        state.all_off[row], state.all_off_loss[row] = record.all_off, record.all_off_loss
        # What the bad epoch measured of a fossil is not true of the restored one.
        for s, site in enumerate(self.sites):
            if site.name in snapshot.measured:
                for name, value in snapshot.measured[site.name].items():
                    getattr(slots, name)[row, s] = value
                slots.epochs_since_measured[row, s] += (
                    0 if math.isnan(slots.contribution[row, s]) else self.epoch - snapshot.epoch
                )
        return snapshot


def _recorded(state: EnvState) -> tuple[NDArray[np.float64], ...]:
    """Returns the arrays of a validation record, in its order."""
    return state.committed_loss, state.committed, state.all_off, state.all_off_loss


def _measurements(slots: Slots, row: int, s: int) -> dict[str, np.generic]:
    return {name: getattr(slots, name)[row, s] for name in MEASUREMENTS}
