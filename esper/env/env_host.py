"""One host of a :class:`esper.env.training_backend.TrainingBackend`: its validation, results, and governor."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from esper.attribution.counterfactual import CounterfactualHelper
from esper.env.governance import Governance
from esper.env.measurements import record_seeds, record_validation
from esper.env.state import EnvState
from esper.spaces.arrays import Bools
from esper.training.governor import Governor, Panic
from esper.training.host_training import HostTraining
from esper.training.metrics import HOST, EpochMetrics, count_not_finite
from esper.training.validate import Evaluation, evaluate


class EnvHost:
    """The host of row ``row`` in the arrays of a vector env; ``slots`` are the names of its slots in these arrays.

    :meth:`validate` runs where the host trains, :meth:`read` and :meth:`govern` on the main thread.
    """

    def __init__(
        self,
        training: HostTraining,
        governor: Governor,
        slots: tuple[str, ...],
        row: int,
    ) -> None:
        self.training = training
        self.governor = governor
        self.row = row
        self.index = training.index
        self.slot_sites = [training.site_by_name[name] for name in slots]
        """Sites in the order of the arrays' slots; ``training.sites`` are in the order of execution."""
        self.counterfactual = CounterfactualHelper()
        self.not_finite = 0.0
        """Number of non-finite values in losses, scores, the host with its buffers, fossils, and their gradients."""
        self.finite: Bools = np.ones(len(slots), dtype=np.bool_)
        """[S]: False for a seed that had a non-finite value."""
        self.governance = Governance(
            row,
            training,
            self.slot_sites,
            self.counterfactual,
            governor,
        )

    # Executors report errors by index, epoch and batch.
    @property
    def epoch(self) -> int:
        return self.training.epoch

    @property
    def batch(self) -> int:
        return self.training.batch

    def validate(self) -> None:
        """Evaluates all configurations; results stay on the device, in the host's totals and in ``packed``.

        ``packed`` float64 [1 + S + ...] holds the number of non-finite elements in the weights of host and fossils and
        in the host's buffers, the ``finite`` flags of the slots, and the gradient statistics.
        """
        training = self.training
        every = training.config.env.counterfactual_every or 1
        plan = self.counterfactual.plan(training.sites, costly=training.epoch % every == 0)
        evaluate(
            training,
            training.task.validation,
            plan,
            training.calibration,
            training.totals,
        )

        committed = [*training.host_group.parameters]
        for name in training.fossils():
            committed += training.seed_groups[name].parameters
        not_finite = count_not_finite(training.host, training.finite_buffers, committed)

        finite = []
        true = torch.ones((), device=training.device)
        for site in self.slot_sites:
            flag = true if site.planted is None else site.planted.finite
            finite.append(flag)

        # One tensor, so that the transfer to the CPU is one copy.
        self.packed = torch.cat(
            (
                not_finite.view(1),
                torch.stack(finite).double(),
                training.gradient_stats.packed(),
            )
        )

    def read(
        self,
        packed: Tensor,
        totals: EpochMetrics,
        state: EnvState,
    ) -> None:
        """Writes the transferred epoch into ``state``; ``packed`` float64 and the host's ``totals`` are on the CPU."""
        row = self.row
        training = self.training
        results = self.counterfactual

        loss_sum, right, count, _, bad_losses = totals.training.tolist()
        state.train_loss[row] = 0.0
        state.train_accuracy[row] = 0.0
        if count:
            state.train_loss[row] = loss_sum / count
            state.train_accuracy[row] = training.task.points * right / count

        configurations = len(results.configurations)
        evaluation = Evaluation(totals.stats(configurations), totals.correct(configurations))
        scores = evaluation.correct.double().numpy() * (training.task.points / 100)  # 1 is 100 pp
        results.record(scores, evaluation.loss.numpy(), training.task.counts)
        record_validation(state, row, results)

        # The order is that of ``packed``, see validate().
        after_flags = 1 + len(self.slot_sites)
        bad_elements = float(packed[0])
        self.finite = packed[1:after_flags].numpy() > 0
        summaries = training.gradient_stats.summaries(packed[after_flags:])
        record_seeds(
            state.slots,
            row,
            [site.name for site in self.slot_sites],
            results,
            summaries,
            training.config.env.gates,
        )

        # Losses and scores with fossils only and with every seed off enter rewards and the snapshot's record.
        measured = [
            state.loss[row],
            state.committed_loss[row],
            state.all_off_loss[row],
            state.accuracy[row],
            state.committed[row],
            state.all_off[row],
        ]
        bad_measurements = sum(not math.isfinite(value) for value in measured)
        committed = {HOST, *training.fossils()}
        bad_gradients = sum(summary.not_finite for name, summary in summaries.items() if name in committed)
        self.not_finite = bad_losses + bad_elements + bad_measurements + bad_gradients

    def take_first_snapshot(self, state: EnvState) -> None:
        """Starts to govern, after the first validation.

        Raises ValueError if the host is not finite before any training, since no snapshot could restore it.
        """
        if self.not_finite:
            loss = float(state.loss[self.row])
            raise ValueError(
                f"env {self.index}: the host is not finite before any training (validation loss {loss:g}); check its "
                "initial weights and the validation data"
            )
        self.governance.take_first_snapshot(state)

    def govern(self, state: EnvState) -> tuple[Panic, int] | None:
        """Does what :meth:`Governance.govern` describes, after :meth:`read`."""
        train_loss = float(state.train_loss[self.row])
        return self.governance.govern(state, train_loss, self.not_finite, self.finite)
