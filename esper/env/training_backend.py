"""Hosts in training as a backend of the phase loop."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from esper.attribution.counterfactual import max_configurations
from esper.attribution.paired import Paired
from esper.config_resolved import HostTrainingConfig
from esper.data.task import Task
from esper.env.backend import Backend
from esper.env.choices import joining, only_added
from esper.env.device_time import TrainingTime
from esper.env.env_host import EnvHost, assign_roles
from esper.env.state import EnvState
from esper.lifecycle.ramps import STYLES as BLEND_STYLES
from esper.lifecycle.slots import Bools, Floats, Ints
from esper.seeds.blueprints import BlueprintRegistry
from esper.seeds.site import GerminationFailed
from esper.spaces.action import STYLES, ActionSpec
from esper.telemetry.span import Spans
from esper.training.execution.multi_gpu import device_index
from esper.training.governor import Governor, Panic
from esper.training.host_state import host_state, load_host_state
from esper.training.host_trainer import HostTrainer
from esper.training.host_training import HostTraining
from esper.training.metrics import EpochMetrics, make_metrics
from esper.training.rng import seeded
from esper.training.start import give_starts
from esper.training.validate import committed_configuration, evaluate


def make_trainings(
    tasks: Sequence[Task], configs: Sequence[HostTrainingConfig], indices: Sequence[int], devices: int = 1
) -> list[HostTraining]:
    """Makes one host for each task, config and index; those of one device share one block of totals.

    ``devices`` is the number of devices that the tasks lie on, in turn.
    """
    with seeded(0):
        sites = len(tasks[0].new_host(configs[0].env.slots).sites)
    places = [device_index(index, devices) for index in indices]
    rows = {}
    for place, task in dict(zip(places, tasks, strict=True)).items():
        samples, dtype = len(task.validation), task.objective.dtype
        block = make_metrics(places.count(place), task.device, max_configurations(sites), samples, dtype)
        rows[place] = iter(block)
    totals = [next(rows[place]) for place in places]
    return [HostTraining(*each) for each in zip(indices, tasks, configs, totals, strict=True)]


class TrainingBackend(Backend):
    """E hosts of one task, trained together.

    Args:
        spec: names of slots and blueprints in actions.
        spans: the phases, among which training times of GPUs are moved.
        pinned: number of snapshots of each host that lie in pinned CPU memory if hosts are on a GPU, the older first.
        governed: whether bad hosts are rolled back.
    """

    def __init__(
        self,
        trainer: HostTrainer,
        spec: ActionSpec,
        blueprints: BlueprintRegistry,
        spans: Spans,
        pinned: int = 0,
        governed: bool = True,
    ) -> None:
        self.trainer, self.spec, self.blueprints, self.governed = trainer, spec, blueprints, governed
        first = trainer.hosts[0].host
        parts = (first.topology, first.sites, spec, blueprints)
        self.only_added = only_added(*parts)
        self.at_once = joining(*parts) & trainer.hosts[0].config.env.at_once
        self.each = []
        for row, training in enumerate(trainer.hosts):
            classes = training.task.classes if training.task.loss == "cross_entropy" else None
            governor = Governor(training.config.governor, training.durations, classes, pinned)
            self.each.append(EnvHost(training, governor, spec.slots, row))
        self.training_time = TrainingTime(spans, dict.fromkeys(training.device for training in trainer.hosts))
        self.look: Callable[[EnvHost], Any] | None = None
        """Called after each validation of a host, before anything changes; what it returns is kept in ``seen``."""
        self.count_epochs: Callable[[int], None] = lambda hosts: None
        """Called with 0 after hosts were trained to start from, see SlotVectorEnv."""
        self.seen: list[list[Any]] = [[] for _ in self.each]
        """By host, of its current episode: first of the untrained host, then of its epochs."""

    def reset(self, starting: Bools, run_seed: int, episodes: Ints) -> None:
        for host in self._of(starting):
            host.training.reset(run_seed, int(episodes[host.row]))
            host.governor.reset()
            self.seen[host.row] = []
        if self.trainer.hosts[0].task.trained:
            give_starts([host.training for host in self._of(starting)], self.trainer.executor)
            self.count_epochs(0)

    def plant(self, where: Bools, blueprint: Ints, style: Ints) -> tuple[Ints, dict[int, str]]:
        sizes, failures = np.zeros((len(where), 1), dtype=np.int64), {}
        for row, s in np.argwhere(where).tolist():
            host = self.each[row]
            name = self.spec.blueprints[int(blueprint[row, 0])]
            recipe = self.blueprints.at(host.training.host.topology, host.slot_sites[s].place, name)
            try:
                host.training.plant(host.slot_sites[s], recipe, BLEND_STYLES[STYLES[int(style[row, 0])]])
                sizes[row] = host.slot_sites[s].parameters
            except GerminationFailed as failure:
                failures[row] = str(failure)
        return sizes, failures

    def remove(self, where: Bools) -> None:
        for row, s in np.argwhere(where).tolist():
            self.each[row].training.remove(self.each[row].slot_sites[s])

    def train(self, active: Bools, state: EnvState) -> None:
        hosts = self._of(active)
        for host in hosts:
            assign_roles(host.training, host.slot_sites, state.slots, host.row)
        with self.training_time.queueing():
            self.trainer.epoch([host.training for host in hosts])

    def measure(self, active: Bools, state: EnvState) -> None:
        hosts, blocks = self._of(active), defaultdict[int, list[EnvHost]](list)
        self.trainer.repeatable(EnvHost.validate, hosts)
        for host in hosts:
            blocks[id(host.training.totals.accumulators)].append(host)
        for of_one_device in blocks.values():
            _transfer(of_one_device, state)
        if self.look is not None:
            for host in hosts:
                self.seen[host.row].append(self.look(host))

    def take_first_snapshots(self, starting: Bools, state: EnvState) -> None:
        for host in self._of(starting) if self.governed else ():
            host.take_first_snapshot(state)

    def govern(self, active: Bools, state: EnvState) -> dict[int, tuple[Panic, int]]:
        self.training_time.move_gpu_seconds()
        outcomes = {host.row: host.govern(state) for host in self._of(active)} if self.governed else {}
        return {env: rolled for env, rolled in outcomes.items() if rolled is not None}

    def shapley(self, env: int) -> dict[str, Paired]:
        """Returns the Shapley values of an env's seeds by slot, of its last validation; {} unless all were measured."""
        return self.each[env].counterfactual.shapley()

    def test_accuracy(self, state: EnvState) -> Floats:
        accuracy = np.zeros(len(self.each))

        def test(host: EnvHost) -> None:
            training = host.training
            result = evaluate(training, training.task.test, [committed_configuration(training)])
            accuracy[host.row] = float(result.accuracy[0])

        self.trainer.repeatable(test, self.each)
        return accuracy

    def of_each(self, question: Callable[[Any], list[Any]]) -> list[Any]:
        return question(self)

    def state_dict(self) -> Any:
        return [{"training": host_state(host.training), "governor": host.governor.state_dict()} for host in self.each]

    def load_state_dict(self, saved: Any, state: EnvState) -> None:
        """Resumes. Raises KeyError or ValueError if ``saved`` belongs to different hosts."""
        for host, mine in zip(self.each, saved, strict=True):
            load_host_state(host.training, mine["training"], self.blueprints)
            host.governor.load_state_dict(mine["governor"], host.training.device)
            assign_roles(host.training, host.slot_sites, state.slots, host.row)

    def close(self) -> None:
        try:
            self.trainer.executor.close()
        finally:  # a GPU that failed
            self.trainer.close()

    def _of(self, active: Bools) -> list[EnvHost]:
        return [host for host, chosen in zip(self.each, active, strict=True) if chosen]


def copies_held(hosts: TrainingBackend) -> list[Counter[str]]:
    """Bytes of the copies that are kept of each host, by where they lie: ``cpu``, ``cuda:0``, ... or ``pinned``."""
    return [host.governor.held() for host in hosts.each]


def _transfer(hosts: list[EnvHost], state: EnvState) -> None:
    """Transfers the epoch of hosts on one device and reads it: once all totals, once all flags and statistics."""
    totals = hosts[0].training.totals.accumulators.read()
    packed = torch.cat([host.packed for host in hosts]).cpu()
    for host, mine in zip(hosts, torch.split(packed, [len(host.packed) for host in hosts]), strict=True):
        host.read(mine, EpochMetrics(totals, host.training.totals.place), state)
