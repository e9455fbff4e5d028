"""Controls of a grown host, made for every pair from its result and trained without growth.

They are its final topology trained from scratch, a wider host of the same size, and the host alone trained with the
same compute.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar

from esper.compare.arms import CONTROL_NAMES
from esper.compare.compute import ComputeMeter, EpochKind, episodes, watch
from esper.compare.runner import ArmRunner, HostResult
from esper.config import ConfigError
from esper.config.resolved import HostTrainingConfig
from esper.core.blueprints import BLUEPRINTS, BlueprintRegistry
from esper.data.task import Task, resolve
from esper.env.make import EnvMaker
from esper.env.no_growth import no_growth_loop
from esper.env.rank_hosts import RankServer, shares_of_others
from esper.files.grown_host import assemble
from esper.hosts.grown import KeptSeed
from esper.hosts.host import Host
from esper.hosts.sizes import HostFamily, nearest_in_size
from esper.hosts.widen import redraw
from esper.training.execution.tiers import make_executor
from esper.training.host_trainer import HostTrainer, make_trainings
from esper.training.rng import seeded

Control = tuple[Task, HostTrainingConfig, dict[str, Any]]
"""A task that says how the host is built, a config that says how long it trains, and facts about it."""


class ControlRunner(ArmRunner):
    """Base class of arms that train hosts without growth, one for each host of the arm ``control_of``.

    Raises ConfigError if hosts are simulated, and so have no network.
    """

    kind = ""
    equal_compute = False
    """Whether a control trains for the number of epochs that compute as much as the grown host did."""

    def __init__(self, maker: EnvMaker, control_of: str, run_seed: int) -> None:
        if maker.task is None:
            raise ConfigError(f"{self.kind} trains a network, but hosts of {maker.config.task.name} are simulated")
        self.task = maker.task
        self.config = resolve(maker.config, maker.task)
        self.ranks = maker.ranks
        self.local_run = self.config.run if self.ranks is None else self.ranks.own(self.config.run)
        """The workers and the device of this process."""
        self.control_of = control_of
        self.run_seed = run_seed
        self.blueprints = BLUEPRINTS.copy()
        with seeded(0):  # the weights are not used
            self.host = self.task.new_host(self.config.env.slots)
            self.host.probe(self.task.sample.cpu())
        self.check()

    def check(self) -> None:
        """Raises ConfigError if hosts of the task cannot have such controls."""

    @abstractmethod
    def make(self, grown: HostResult) -> Control:
        """Returns the control of one grown host, before its number of epochs is adapted."""

    def play(self, number: int, grown: Sequence[HostResult]) -> list[HostResult]:
        """Trains the controls of a round, each rank those of its part: no decision in them waits for another host."""
        if self.ranks is None:
            return self.train(number, grown)

        calls = {}
        for rank, rows in shares_of_others(self.ranks, len(grown)).items():
            part = (type(self), self.control_of, self.run_seed, number, grown[rows], rows.start)
            calls[rank] = (RankServer.apply, self.config, train_part, part)
        self.ranks.start(calls)
        # In the order of hosts: this rank's part is the first one.
        mine = self.train(number, grown[: len(self.ranks.share(len(grown)))])
        return list(chain(mine, *self.ranks.finish().values()))

    def train(self, number: int, grown: Sequence[HostResult], first: int = 0) -> list[HostResult]:
        """Trains the control of host i as env ``first`` + i of the round.

        It gets the same initial weights for the same layers, the same batches, the same phases of an epoch and the same
        governor.
        """
        controls = list(map(self._control, grown))
        tasks, configs, facts = zip(*controls, strict=True)
        training = make_trainings(tasks, configs, range(first, first + len(tasks)))
        meters = [ComputeMeter(task, config, self.blueprints) for task, config, _ in controls]
        with (
            make_executor(self.local_run, self.task.device) as executor,
            closing(HostTrainer(self.task, training, executor)) as trainer,
        ):
            loop, alone = no_growth_loop(trainer)
            watch(alone)
            loop.state.episode[:] = number - 1  # the next episode is that of this round
            *_, state = loop.without_growth(self.run_seed)
            accuracy = alone.test_accuracy(state)
            trained = episodes(alone)
        return [
            HostResult(
                accuracy=float(accuracy[i]),
                loss=float(state.committed_loss[i]),
                parameters=float(training[i].host.parameter_count),
                host_parameters=float(self.host.parameter_count),
                flops=meters[i].flops(trained[i]),
                epochs=float(state.epoch[i]),
                rollbacks=float(state.rollbacks[i]),
                fossils=0.0,
                facts={"validation_accuracy": float(state.committed[i]), **facts[i]},
            )
            for i in range(len(training))
        ]

    def _control(self, grown: HostResult) -> Control:
        control = self.make(grown)
        return at_compute(control, grown.flops, self.blueprints) if self.equal_compute else control


Runner = TypeVar("Runner", bound=ControlRunner)
CONTROLS: dict[str, type[ControlRunner]] = {}
"""Arms that are made from the results of another arm, by name."""


def register(runner: type[Runner]) -> type[Runner]:
    """Makes ``runner`` an arm of comparisons, named ``runner.kind``; a decorator of classes.

    Raises ConfigError if the name is taken.
    """
    known = CONTROLS.get(runner.kind, runner)
    if (known.__module__, known.__qualname__) != (runner.__module__, runner.__qualname__):
        raise ConfigError(f"there is a control named {runner.kind} already; registered: {', '.join(CONTROLS)}")
    CONTROLS[runner.kind] = runner
    if runner.kind not in CONTROL_NAMES:
        CONTROL_NAMES.append(runner.kind)
    return runner


@register
class StaticRunner(ControlRunner):
    """Trains the grown host's final topology from fresh weights, all of it together.

    Its seeds are part of the host: one optimizer, one weight decay, one clip norm, as for every other host. The host's
    own layers start from the same weights as those of the grown host.
    """

    kind = "static"

    def make(self, grown: HostResult) -> Control:
        return self.built_in(grown.kept, grown.shapes)

    def built_in(
        self,
        kept: Mapping[str, KeptSeed],
        shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> Control:
        """Returns the control whose host has seeds like those of ``kept``, by slot.

        Layers of other ``shapes``, by the names of their tensors, start from fresh weights, as those of a host that was
        made with them.
        """
        task = self.task
        slots = self.config.env.slots
        names = {slot: seed.blueprint for slot, seed in kept.items()}
        sample = task.sample.cpu()

        def build() -> Host:
            host = task.new_host(slots)
            host.probe(sample)  # initialises lazy layers and finds the sites of a graft
            redraw(host, shapes)
            host.follow_layers(sample)
            places = {place.name: place for place in host.sites}
            blueprints = {}
            for slot, name in names.items():
                blueprints[slot] = self.blueprints.at(host.topology, places[slot], name)
            whole = assemble(host, kept, blueprints, task.name)
            whole.new_seeds = True
            return whole

        # Slots are chosen before the seeds are built in.
        config = self.config.with_values(env={"slots": None})
        return replace(task, build_host=build, slots=None), config, {"built_in": names}


@register
class BiggerRunner(ControlRunner):
    """Trains the task's host, widened until its number of parameters is nearest to the grown host's.

    Raises ConfigError if the host cannot be widened: a custom network whose task has no ``HostFamily``.
    """

    kind = "bigger"

    def check(self) -> None:
        super().check()
        self._nearest(self.host.parameter_count)  # refuses a host that cannot be widened

    def make(self, grown: HostResult) -> Control:
        family = self._nearest(int(grown.parameters))
        facts = {"width": family.width, "wanted_parameters": grown.parameters}
        return replace(self.task.from_new_weights(), build_host=family), self.config, facts

    def _nearest(self, parameters: int) -> HostFamily:
        """Returns a factory of the host whose number of parameters is nearest to ``parameters``."""
        with seeded(0):  # the weights are not used
            return nearest_in_size(self.task.from_new_weights().build_host, parameters, self.task.sample.cpu())


@register
class SameComputeRunner(ControlRunner):
    """Trains the host alone for the number of epochs nearest to the grown host's compute, on a stretched schedule."""

    kind = "same-compute"
    equal_compute = True

    def make(self, grown: HostResult) -> Control:
        return self.task, self.config, {}


def at_compute(control: Control, flops: float, blueprints: BlueprintRegistry) -> Control:
    """Returns the control with the number of epochs whose floating-point operations are nearest to ``flops``.

    Raises ConfigError if none of its operations can be counted.
    """
    task, config, facts = control
    with seeded(0):
        sites = len(task.new_host(config.env.slots).sites)
    training, validation = ComputeMeter(task, config, blueprints).of_epoch(EpochKind.alone(sites))
    an_epoch = training + validation
    if not an_epoch:
        raise ConfigError(f"equal compute: none of the operations in the passes of {task.name} can be counted")
    # The untrained host is validated, too.
    epochs = max(1, round((flops - validation) / an_epoch))
    config = config.with_values(env={"episode_length": epochs})
    return task, config, {**facts, "wanted_flops": flops}


def train_part(
    task: Task,
    config: HostTrainingConfig,
    kind: type[ControlRunner],
    control_of: str,
    run_seed: int,
    number: int,
    grown: Sequence[HostResult],
    first: int,
) -> list[HostResult]:
    """Trains the controls that another rank has of a round; ``first`` is the env of the first one."""
    return kind(EnvMaker(config, task), control_of, run_seed).train(number, grown, first)
