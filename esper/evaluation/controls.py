"""Controls of a grown host, made for every pair from its result.

They are its final topology trained from scratch, a wider host of the same size, and the host alone trained with the
same compute.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from esper.config import ConfigError
from esper.env.make import EnvMaker
from esper.evaluation.compute import ComputeMeter, EpochKind
from esper.evaluation.runner import ArmRunner, HostResult
from esper.evaluation.static_hosts import FixedHost, train_fixed
from esper.files.grown_host import assemble
from esper.hosts.grown import StaticHost
from esper.hosts.host import Host
from esper.hosts.sizes import nearest_in_size
from esper.seeds.blueprints import BLUEPRINTS
from esper.training.rng import seeded


class ControlRunner(ArmRunner):
    """Base class of arms that train hosts without growth, one for each host of the arm ``control_of``.

    Raises:
        ConfigError: hosts are simulated, and have no network.
    """

    kind = ""

    def __init__(self, maker: EnvMaker, control_of: str, run_seed: int) -> None:
        if maker.task is None:
            raise ConfigError(f"{self.kind} trains a network, but hosts of {maker.config.task.name} are simulated")
        self.task, self.config, self.control_of, self.run_seed = maker.task, maker.config, control_of, run_seed
        self.blueprints = BLUEPRINTS.copy()
        with seeded(0):
            self.host = self.task.build_host()
            self.host.probe(self.task.sample.cpu())

    def play(self, number: int, grown: Sequence[HostResult]) -> list[HostResult]:
        controls = [self.make(host) for host in grown]
        results = train_fixed([host for host, _ in controls], self.run_seed, number, self.blueprints)
        alone = float(self.host.parameter_count)
        return [
            replace(result, host_parameters=alone, facts={**result.facts, **facts})
            for result, (_, facts) in zip(results, controls, strict=True)
        ]

    @abstractmethod
    def make(self, grown: HostResult) -> tuple[FixedHost, dict[str, Any]]:
        """Returns the control of one grown host, and facts about it."""


class StaticRunner(ControlRunner):
    """Trains the grown host's final topology from fresh weights, all of it together.

    Its seeds are part of the host: one optimizer, one weight decay, one clip norm, as for every other host. The host's
    own layers start from the same weights as those of the grown host.
    """

    kind = "static"

    def make(self, grown: HostResult) -> tuple[FixedHost, dict[str, Any]]:
        task, topology = self.task, self.host.topology
        blueprints = {slot: self.blueprints.get(topology, seed.blueprint) for slot, seed in grown.kept.items()}
        sample = task.sample.cpu()

        def build() -> Host:
            host = task.build_host()
            host.probe(sample)  # initialises lazy layers and finds the sites of a graft
            return StaticHost(assemble(host, grown.kept, blueprints, task.name))

        seeds = {slot: seed.blueprint for slot, seed in grown.kept.items()}
        return FixedHost(replace(task, build_host=build), self.config), {"built_in": seeds}


class BiggerRunner(ControlRunner):
    """Trains the task's host, widened until its number of parameters is nearest to the grown host's.

    Raises:
        ConfigError: the host cannot be widened, for example a grafted one.
    """

    kind = "bigger"

    def __init__(self, maker: EnvMaker, control_of: str, run_seed: int) -> None:
        super().__init__(maker, control_of, run_seed)
        nearest_in_size(self.host, self.host.parameter_count)  # refuses a host that cannot be widened

    def make(self, grown: HostResult) -> tuple[FixedHost, dict[str, Any]]:
        size = nearest_in_size(self.host, int(grown.parameters))
        facts = {"width": size.width, "wanted_parameters": grown.parameters}
        return FixedHost(replace(self.task, build_host=size.build), self.config), facts


class SameComputeRunner(ControlRunner):
    """Trains the host alone for the number of epochs nearest to the grown host's compute, on a stretched schedule."""

    kind = "same-compute"

    def __init__(self, maker: EnvMaker, control_of: str, run_seed: int) -> None:
        super().__init__(maker, control_of, run_seed)
        meter = ComputeMeter(self.task, self.config, self.blueprints)
        training, validation = meter.of_epoch(EpochKind.alone(len(self.host.sites)))
        self.first, self.each = validation, training + validation
        """Operations before the first epoch (``first``) and per epoch (``each``)."""
        if not self.each:
            raise ConfigError("same-compute: none of the operations in this host's passes can be counted")

    def make(self, grown: HostResult) -> tuple[FixedHost, dict[str, Any]]:
        epochs = max(1, round((grown.flops - self.first) / self.each))
        config = self.config.with_values(env={"episode_length": epochs})
        return FixedHost(self.task, config), {"wanted_flops": grown.flops}


CONTROLS: dict[str, type[ControlRunner]] = {
    runner.kind: runner for runner in (StaticRunner, BiggerRunner, SameComputeRunner)
}
"""Arms that are made from the results of another arm."""
