"""Hosts in training as a backend of the phase loop."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from esper.attribution.counterfactual import max_configurations
from esper.attribution.paired import Paired
from esper.config.resolved import HostTrainingConfig
from esper.data.task import Task
from esper.env.backend import Backend, Rollbacks
from esper.env.choices import joining, only_added
from esper.env.device_time import TrainingTime
from esper.env.env_host import EnvHost
from esper.env.roles import assign_roles
from esper.env.state import EnvState
from esper.lifecycle.ramps import STYLES as BLEND_STYLES
from esper.lifecycle.slots import Bools, Floats, Ints
from esper.seeds.blueprints import BlueprintRegistry
from esper.seeds.site import GerminationFailed
from esper.spaces.action import STYLES, ActionSpec
from esper.telemetry.span import Spans
from esper.training.execution.multi_gpu import device_index
from esper.training.governor import Governor
from esper.training.host_state import host_state, load_host_state
from esper.training.host_trainer import HostTrainer
from esper.training.host_training import HostTraining
from esper.training.metrics import EpochMetrics, make_metrics
from esper.training.rng import seeded
from esper.training.start import give_starts
from esper.training.validate import committed_configuration, evaluate


def make_trainings(
    tasks: Sequence[Task],
    configs: Sequence[HostTrainingConfig],
    indices: Sequence[int],
    devices: int = 1,
) -> list[HostTraining]:
    """Makes one host for each task, config and index; those of one device share one block of totals.

    ``devices`` is the number of devices that the tasks lie on, in turn.
    """
    with seeded(0):  # a host to count its sites
        sites = len(tasks[0].new_host(configs[0].env.slots).sites)
    places = [device_index(index, devices) for index in indices]
    blocks = {}
    for place, task in dict(zip(places, tasks, strict=True)).items():
        blocks[place] = make_metrics(
            places.count(place),
            task.device,
            max_configurations(sites),
            len(task.validation),
            task.objective.dtype,
        )

    trainings = []
    for index, task, config, place in zip(indices, tasks, configs, places, strict=True):
        totals = blocks[place].pop(0)  # the next row
        trainings.append(HostTraining(index, task, config, totals))
    return trainings


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
        self.trainer = trainer
        self.spec = spec
        self.blueprints = blueprints
        self.governed = governed
        # Hosts of one task have the same sites.
        host = trainer.hosts[0].host
        may_join = joining(host.topology, host.sites, spec, blueprints)
        self.at_once = may_join & trainer.hosts[0].config.env.at_once
        self.only_added = only_added(host.topology, host.sites, spec, blueprints)
        self.each = []
        for row, training in enumerate(trainer.hosts):
            task = training.task
            # The loss of a guess is known for classes only.
            classes = task.classes if task.loss == "cross_entropy" else None
            governor = Governor(
                training.config.governor,
                training.durations,
                classes,
                pinned,
            )
            self.each.append(EnvHost(training, governor, spec.slots, row))
        devices = dict.fromkeys(training.device for training in trainer.hosts)
        self.training_time = TrainingTime(spans, devices)
        self.look: Callable[[EnvHost], Any] | None = None
        """Called after each validation of a host, before anything changes; what it returns is kept in ``seen``."""
        self.count_epochs: Callable[[int], None] = lambda _hosts: None
        """Called with 0 after hosts were trained to start from, see SlotVectorEnv."""
        self.seen: list[list[Any]] = [[] for _ in self.each]
        """By host, of its current episode: first of the untrained host, then of its epochs."""

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
            self.count_epochs(0)

    def plant(
        self,
        where: Bools,
        blueprint: Ints,
        style: Ints,
    ) -> tuple[Ints, dict[int, str]]:
        sizes = np.zeros((len(where), 1), dtype=np.int64)
        failures = {}
        for row, s in np.argwhere(where).tolist():
            training = self.each[row].training
            site = self.each[row].slot_sites[s]
            name = self.spec.blueprints[int(blueprint[row, 0])]
            recipe = self.blueprints.at(training.host.topology, site.place, name)
            blend = BLEND_STYLES[STYLES[int(style[row, 0])]]
            try:
                training.plant(site, recipe, blend)
                sizes[row] = site.parameters
            except GerminationFailed as failure:
                failures[row] = str(failure)
        return sizes, failures

    def remove(self, where: Bools) -> None:
        for row, s in np.argwhere(where).tolist():
            host = self.each[row]
            host.training.remove(host.slot_sites[s])

    def train(self, active: Bools, state: EnvState) -> None:
        hosts = self._of(active)
        for host in hosts:
            assign_roles(host.training, host.slot_sites, state.slots, host.row)
        with self.training_time.queueing():
            self.trainer.epoch([host.training for host in hosts])

    def measure(self, active: Bools, state: EnvState) -> None:
        hosts = self._of(active)
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
        self.training_time.move_gpu_seconds()
        if not self.governed:
            return {}
        rollbacks: Rollbacks = {}
        for host in self._of(active):
            rollback = host.govern(state)
            if rollback is not None:
                rollbacks[host.row] = rollback
        return rollbacks

    def shapley(self, env: int) -> dict[str, Paired]:
        """Returns the Shapley values of an env's seeds by slot, of its last validation; {} unless all were measured."""
        return self.each[env].counterfactual.shapley()

    def test_accuracy(self, state: EnvState) -> Floats:
        accuracy = np.zeros(len(self.each))

        def test(host: EnvHost) -> None:
            training = host.training
            result = evaluate(training, training.task.test, [committed_configuration(training)])
            accuracy[host.row] = float(result.accuracy[0])

        self.trainer.run(test, self.each)
        return accuracy

    def map_hosts(self, function: Callable[[Any], list[Any]]) -> list[Any]:
        return function(self)

    def state_dict(self) -> Any:
        states = []
        for host in self.each:
            state = {
                "training": host_state(host.training),
                "governor": host.governor.state_dict(),
            }
            states.append(state)
        return states

    def load_state_dict(self, saved: Any, state: EnvState) -> None:
        """Resumes. Raises KeyError or ValueError if ``saved`` belongs to different hosts."""
        for host, of_host in zip(self.each, saved, strict=True):
            load_host_state(host.training, of_host["training"], self.blueprints)
            host.governor.load_state_dict(of_host["governor"], host.training.device)
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
    start = 0
    for host in hosts:
        end = start + len(host.packed)
        host.read(packed[start:end], EpochMetrics(totals, host.training.totals.place), state)
        start = end
