"""Hosts in training as a backend of the phase loop."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper.core.action import STYLES
from esper.core.ramps import STYLES as BLEND_STYLES
from esper.core.site import GerminationFailed
from esper.core.slots import Bools, Floats, Ints
from esper.core.state import EnvState
from esper.env.backend import Backend, FinalScores, Merge, Release, Rollbacks
from esper.env.catalog import BlueprintCatalog
from esper.env.host_row import Governance, assign_roles, record_seeds, record_validation
from esper.env.merging import Merger
from esper.telemetry.span import Spans
from esper.telemetry.timer import CUDATimer
from esper.training.counterfactual import CounterfactualHelper
from esper.training.governor import Governor, Panic
from esper.training.host_state import host_state, load_host_state
from esper.training.host_trainer import HostTrainer
from esper.training.host_training import HostTraining
from esper.training.metrics import HOST, EpochMetrics, count_not_finite
from esper.training.need import NeedMeter
from esper.training.start import give_starts
from esper.training.validate import Evaluation, committed_configuration, evaluate


class PhaseClock:
    """Books what GPUs train for under "train", though the CPU waits for it under "validate".

    The GPU begins with the block :meth:`queueing` and works ``seconds``, so beyond the time to queue it works
    ``seconds`` less that time, and the CPU waits for it in "validate". Of several GPUs the slowest counts.

    On the CPU, work is done when the call returns. Workers go on from the epoch of a host to its validation within
    "train", from where the seconds of validations are moved.
    """

    def __init__(self, spans: Spans, devices: Iterable[torch.device]) -> None:
        self._spans = spans
        self._timers = [CUDATimer(device) for device in devices if device.type == "cuda"]
        self._queued = 0.0
        """Seconds that it took to queue the last epoch."""
        self._validated = 0.0
        """Seconds of "validate" before it."""
        self._validations: list[tuple[int, float]] = []
        """Threads and seconds of validations that workers went on to."""

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Brackets the queueing of an epoch, within the phase "train".

        Each GPU's stream that is current here takes a timestamp before those of hosts fork from it and after they join.
        """
        if not self._timers:
            yield
            return
        self._validated = self._spans.seconds.get("validate", 0.0)
        began = perf_counter()
        with ExitStack() as timed:
            for timer in self._timers:
                timed.enter_context(timer)
            yield
        self._queued = perf_counter() - began

    def move_gpu_seconds(self) -> None:
        """Moves the seconds that GPUs trained on after the block, at most those of "validate" since the block began.

        It reads the timestamps, which waits for nothing once the results of validation have been transferred.
        """
        if not self._timers:
            return
        # For what the GPUs worked beyond the block the CPU waited in "validate", at most as long as that phase took.
        slowest = max(timer.seconds for timer in self._timers)
        after = slowest - self._queued
        validated = self._spans.seconds.get("validate", 0.0) - self._validated
        self._spans.move("validate", "train", max(0.0, min(after, validated)))

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Brackets a validation within the phase "train", on the thread of a worker."""
        began = perf_counter()
        yield
        self._validations.append((get_ident(), perf_counter() - began))

    def move_validations(self) -> None:
        """Moves the wall seconds of these validations from "train" to "validate"."""
        validations = self._validations
        self._validations = []
        if not validations:
            return
        workers = {worker for worker, _ in validations}
        seconds = sum(seconds for _, seconds in validations) / len(workers)
        trained = self._spans.seconds.get("train", 0.0)
        self._spans.move("train", "validate", min(seconds, trained))


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
        merger: Merger,
        grows: bool = True,
    ) -> None:
        self.merger = merger
        """Makes its fossils a part of its layers."""
        self.training = training
        self.governor = governor
        self.row = row
        self.index = training.index
        self.slot_sites = [training.site_by_name[name] for name in slots]
        """Sites in the order of the arrays' slots; ``training.sites`` are in the order of execution."""
        self.counterfactual = CounterfactualHelper()
        self.need = NeedMeter(training, training.config.env.need_every if grows else 0)
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

        ``packed`` float64 [1 + 2 S + ...] holds the number of non-finite elements of the host with its buffers and
        fossils, the ``finite`` flags of slots, the need of sites, and the gradient statistics.
        """
        training = self.training
        every = training.config.env.counterfactual_every or 1
        plan = self.counterfactual.plan(training.sites, costly=training.epoch % every == 0)
        evaluate(
            training,
            training.task.validation,
            plan,
            training.totals,
        )

        self.need.measure_if_due()
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
                self.need.values,
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
        state.train_measured[row] = count > 0
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
        after_need = after_flags + len(training.sites)
        bad_elements = float(packed[0])
        self.finite = packed[1:after_flags].numpy() > 0
        if self.need.due:
            state.slots.need[row] = self.need.in_order(self.slot_sites, packed[after_flags:after_need])
        summaries = training.gradient_stats.summaries(packed[after_need:])
        record_seeds(
            state,
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

    def by_class(self) -> tuple[float, ...]:
        """Returns the accuracy of the committed network on each class in the last validation, pp; () if samples have no
        class, there are many classes, or the host was rolled back."""
        task = self.training.task
        if task.labels is None or not self.counterfactual.configurations:
            return ()
        return self.counterfactual.by_class(task.labels, task.classes or 0)

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
        """Runs the governor on the epoch that :meth:`read` stored."""
        train_loss = float(state.train_loss[self.row])
        return self.governance.govern(state, train_loss, self.not_finite, self.finite)


class TrainingBackend(Backend):
    """E hosts of one task, trained together.

    Args:
        catalog: the seeds that can be planted; hosts of one task have the same sites.
        spans: the phases, among which training times of GPUs are moved.
        governed: whether bad hosts are rolled back; hosts that are not are left alone, and their need is not measured.
    """

    def __init__(
        self,
        trainer: HostTrainer,
        catalog: BlueprintCatalog,
        spans: Spans,
        governed: bool = True,
    ) -> None:
        self.trainer = trainer
        self.catalog = catalog
        self.governed = governed
        self.at_once = catalog.at_once & trainer.hosts[0].config.env.at_once
        self.only_added = catalog.only_added
        merger = Merger(catalog)
        self.hosts = [self.host_of(training, row, merger) for row, training in enumerate(trainer.hosts)]
        devices = dict.fromkeys(training.device for training in trainer.hosts)
        self.clock = PhaseClock(spans, devices)
        self.look: Callable[[EnvHost], Any] | None = None
        """Called after each validation of a host, before anything changes; what it returns is kept in ``seen``."""
        self.seen: list[list[Any]] = [[] for _ in self.hosts]
        """By host, of its current episode: first of the untrained host, then of its epochs."""
        on_cpu = all(device.type == "cpu" for device in devices)
        self.at_one_go = on_cpu and trainer.batches is None
        """Whether workers go on from an epoch of a host to its validation, without waiting for the other hosts."""
        self._validated = False
        """Whether the last epoch has been validated."""

    def host_of(self, training: HostTraining, row: int, merger: Merger) -> EnvHost:
        """Makes the host of row ``row`` of the arrays."""
        governor = Governor(training.config.governor, training.durations, training.task.guessed)
        return EnvHost(
            training,
            governor,
            self.catalog.spec.slots,
            row,
            merger,
            grows=self.governed,
        )

    def reset(
        self,
        starting: Bools,
        run_seed: int,
        episodes: Ints,
    ) -> None:
        hosts = self._of(starting)
        for host in hosts:
            host.training.reset(run_seed, int(episodes[host.row]))
            host.governor.reset()
            self.seen[host.row] = []
        if self.trainer.hosts[0].task.trained:
            give_starts([host.training for host in hosts], self.trainer.executor)

    def plant(
        self,
        where: Bools,
        blueprint: Ints,
        style: Ints,
    ) -> tuple[Ints, dict[int, str]]:
        sizes = np.zeros((len(where), 1), dtype=np.int64)
        failures = {}
        for row, s in np.argwhere(where).tolist():
            training = self.hosts[row].training
            site = self.hosts[row].slot_sites[s]
            name = self.catalog.spec.blueprints[int(blueprint[row, 0])]
            recipe = self.catalog.registry.at(training.host.topology, site.place, name)
            blend = BLEND_STYLES[STYLES[int(style[row, 0])]]
            try:
                training.plant(site, recipe, blend)
                sizes[row] = site.parameters
            except GerminationFailed as failure:
                failures[row] = str(failure)
        return sizes, failures

    def remove(self, where: Bools) -> None:
        for row, s in np.argwhere(where).tolist():
            host = self.hosts[row]
            host.training.remove(host.slot_sites[s])

    def train(self, active: Bools, state: EnvState) -> None:
        hosts = self._of(active)
        for host in hosts:
            assign_roles(host.training, host.slot_sites, state.slots, host.row)
        by_index = {host.index: host for host in hosts}

        def validate(training: HostTraining) -> None:
            with self.clock.validating():
                by_index[training.index].validate()

        with self.clock.queueing():
            self.trainer.epoch(
                [host.training for host in hosts],
                validate if self.at_one_go else None,
            )
        self._validated = self.at_one_go

    def measure(self, active: Bools, state: EnvState) -> None:
        hosts = self._of(active)
        if self._validated:
            self._validated = False
            self.clock.move_validations()
        else:
            self.trainer.run(EnvHost.validate, hosts)

        # The hosts of one device share one block of totals.
        blocks = defaultdict[int, list[EnvHost]](list)
        for host in hosts:
            blocks[id(host.training.totals.accumulators)].append(host)
        for of_one_device in blocks.values():
            _transfer(of_one_device, state)

        if self.look is not None:
            for host in hosts:
                self.seen[host.row].append(self.look(host))

    def take_first_snapshots(self, starting: Bools, state: EnvState) -> None:
        if not self.governed:
            return
        for host in self._of(starting):
            host.take_first_snapshot(state)

    def govern(self, active: Bools, state: EnvState) -> Rollbacks:
        self.clock.move_gpu_seconds()
        if not self.governed:
            return {}
        rollbacks: Rollbacks = {}
        for host in self._of(active):
            rollback = host.govern(state)
            if rollback is not None:
                rollbacks[host.row] = rollback
        return rollbacks

    def merge(self, due: Bools, state: EnvState) -> dict[int, Merge]:
        merges = {}
        for row in np.flatnonzero(due.any(axis=1)).tolist():
            host = self.hosts[row]
            assign_roles(host.training, host.slot_sites, state.slots, host.row)  # some are new
            merge = host.merger.merge(host.training, host.slot_sites, due[row])
            if merge is not None:
                merges[row] = merge
        return merges

    def rebase(self, where: Bools, state: EnvState) -> None:
        if self.governed:
            for host in self._of(where):
                host.governance.rebase(state)

    def take_out(self, where: Bools) -> dict[int, Release]:
        releases = {}
        for row, s in np.argwhere(where).tolist():
            host = self.hosts[row]
            releases[row] = host.merger.release(host.training, host.slot_sites[s].name)
        return releases

    def final_scores(self, env: int) -> FinalScores:
        host = self.hosts[env]
        return FinalScores(host.counterfactual.shapley(), host.by_class())

    def test_accuracy(self, state: EnvState) -> Floats:
        accuracy = np.zeros(len(self.hosts))

        def test(host: EnvHost) -> None:
            training = host.training
            result = evaluate(training, training.task.test, [committed_configuration(training)])
            accuracy[host.row] = float(result.accuracy[0])

        self.trainer.run(test, self.hosts)
        return accuracy

    def map_hosts(self, function: Callable[[Any], list[Any]]) -> list[Any]:
        return function(self)

    def state_dict(self) -> Any:
        states = []
        for host in self.hosts:
            state = {
                "training": host_state(host.training),
                "governor": host.governor.state_dict(),
            }
            states.append(state)
        return states

    def load_state_dict(self, saved: Any, state: EnvState) -> None:
        """Resumes. Raises KeyError or ValueError if ``saved`` belongs to different hosts."""
        for host, of_host in zip(self.hosts, saved, strict=True):
            load_host_state(host.training, of_host["training"], self.catalog.registry)
            host.governor.load_state_dict(of_host["governor"], host.training.device)
            assign_roles(host.training, host.slot_sites, state.slots, host.row)

    def close(self) -> None:
        try:
            self.trainer.executor.close()
        finally:  # a GPU that failed
            self.trainer.close()

    def _of(self, active: Bools) -> list[EnvHost]:
        return [host for host, chosen in zip(self.hosts, active, strict=True) if chosen]


def accuracy_by_class(hosts: TrainingBackend) -> list[tuple[float, ...]]:
    """Accuracy of each host on each class in its last validation, pp, see :meth:`EnvHost.by_class`."""
    return [host.by_class() for host in hosts.hosts]


def copies_held(hosts: TrainingBackend) -> list[Counter[str]]:
    """Bytes of the copies that are kept of each host, by where they lie: ``cpu``, ``cuda:0``, ..."""
    return [host.governor.held() for host in hosts.hosts]


def _transfer(hosts: list[EnvHost], state: EnvState) -> None:
    """Transfers the epoch of hosts on one device and reads it: once all totals, once all flags and statistics."""
    totals = hosts[0].training.totals.accumulators.read()
    packed = torch.cat([host.packed for host in hosts]).cpu()
    start = 0
    for host in hosts:
        end = start + len(host.packed)
        host.read(packed[start:end], EpochMetrics(totals, host.training.totals.place), state)
        start = end
