"""Other uses of the price of growing: controls that compute as much as the grown host, and the table of all controls.

The schedule of each fits in the epochs that its compute allows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

from esper.compare.controls import (
    BiggerRunner,
    Control,
    ControlRunner,
    SameComputeRunner,
    StaticRunner,
    at_compute,
)
from esper.compare.runner import HostResult
from esper.config import ConfigError
from esper.data.task import Task
from esper.hosts.adapted import AdaptedHost, import_peft, size_of_rank
from esper.hosts.beside import BesideHost, Distilled, Ensemble
from esper.hosts.grown import KeptSeed
from esper.hosts.host import Host
from esper.hosts.net2net import widen_as_copies
from esper.seeds.place import Place
from esper.training.rng import seeded


class StaticComputeRunner(StaticRunner):
    """Trains the grown host's final topology, all of it together, for as much compute."""

    kind = "static-compute"
    equal_compute = True


class BiggerComputeRunner(BiggerRunner):
    """Trains the wider host of the size from new weights, for as much compute."""

    kind = "bigger-compute"
    equal_compute = True


class UniformRunner(StaticRunner):
    """Trains the host with the same seed in every slot of one row from the start, for as much compute.

    Of all rows and blueprints, it has those whose number of parameters is nearest to the grown host's.
    """

    kind = "uniform"
    equal_compute = True

    def make(self, grown: HostResult) -> Control:
        wanted = grown.parameters - self.host.parameter_count
        rows = self._rows()
        sizes = self._sizes(rows)
        if not sizes:
            raise ConfigError("uniform: no blueprint fits in every slot of a row")
        row, name = min(sizes, key=lambda choice: abs(sizes[choice] - wanted))
        kept = {place.name: KeptSeed(name, "LINEAR_ADD", 1.0) for place in rows[row]}
        return self.built_in(kept)

    def _rows(self) -> Mapping[str, list[Place]]:
        """Returns the places of each row: the slots r0c0, r0c1, ... are in row r0."""
        rows = defaultdict(list)
        for place in self.host.sites:
            rows[place.name.partition("c")[0]].append(place)
        return rows

    def _sizes(self, rows: Mapping[str, list[Place]]) -> dict[tuple[str, str], int]:
        """Returns the number of parameters of a seed of each blueprint in every slot of a row, by (row, blueprint)."""
        topology = self.host.topology
        sizes = {}
        for row, places in rows.items():
            fitting = [set(self.blueprints.fitting(topology, place)) for place in places]
            for name in set.intersection(*fitting):
                sizes[row, name] = sum(self.blueprints.at(topology, place, name).size(place) for place in places)
        return dict(sorted(sizes.items()))


class Net2NetRunner(BiggerRunner):
    """Trains the wider host of the size, which begins with the function of the host, for as much compute.

    Raises ConfigError for hosts other than chains of layers.
    """

    kind = "net2net"
    equal_compute = True

    def check(self) -> None:
        super().check()
        require_start(self.kind, self.task)
        with seeded(0):  # the wide host is thrown away
            wide = self._nearest(self.host.parameter_count)()
            widen_as_copies(self.host, wide)

    def make(self, grown: HostResult) -> Control:
        task, config, facts = super().make(grown)
        if self.task.trained:
            # The weights of the narrow host are known only when an episode starts.
            task = replace(task, origin=self.task.origin, trained=True, transfer=widen_as_copies)
        else:
            task = replace(task, build_host=_widened(self.task.build_host, task.build_host))
        return task, config, facts


def _widened(build_narrow: Callable[[], Host], build_wide: Callable[[], Host]) -> Callable[[], Host]:
    """Returns a factory of wide hosts with the function of narrow ones."""

    def build() -> Host:
        narrow = build_narrow()
        wide = build_wide()
        widen_as_copies(narrow, wide)
        return wide

    return build


class BesideRunner(ControlRunner):
    """Base class of controls in which another network learns beside the host that was trained before."""

    network: type[BesideHost]
    equal_compute = True

    def check(self) -> None:
        super().check()
        require_start(self.kind, self.task)
        if self.task.loss != "cross_entropy":
            raise ConfigError(f"{self.kind} joins probabilities of classes, but {self.task.name} has another loss")

    def beside(self, build_learner: Callable[[], Host]) -> Control:
        """Returns the control in which a network that ``build_learner`` makes learns beside the host."""
        build_first = self.task.build_host
        sample = self.task.sample

        def build() -> Host:
            host = self.network(build_first(), build_learner())
            host.probe(sample)
            return host

        task = replace(self.task, build_host=build, slots=None)
        config = self.config.with_values(env={"slots": None}, task={"freeze": "nothing"})
        return task, config, {}


class EnsembleRunner(BesideRunner):
    """Trains a second host from new weights for as much compute, and averages the probabilities of both."""

    kind = "ensemble"
    network = Ensemble

    def make(self, grown: HostResult) -> Control:
        return self.beside(self.task.from_new_weights().build_host)


class DistilledRunner(BesideRunner, BiggerRunner):
    """Trains the wider host of the size from new weights and the outputs of the host, for as much compute."""

    kind = "distilled"
    network = Distilled

    def make(self, grown: HostResult) -> Control:
        return self.beside(self._nearest(int(grown.parameters)))


class AdapterRunner(ControlRunner):
    """Trains LoRA adapters of PEFT beside the frozen host, and its last layer, for as much compute.

    Their rank is the one whose number of parameters is nearest to what the grown host has more than the host.
    """

    kind = "lora"
    adaptive = False

    def check(self) -> None:
        super().check()
        require_start(self.kind, self.task)
        if self.adaptive and self.task.device.type == "cuda":
            raise ConfigError(f"{self.kind} counts its steps in Python, which captured steps do not: run.device=cpu")
        import_peft()
        size_of_rank(self.host)

    def make(self, grown: HostResult) -> Control:
        added = grown.parameters - self.host.parameter_count
        rank = max(1, round(added / size_of_rank(self.host)))
        # The cost of a pass does not depend on the number of steps, which is known only afterwards.
        control = self._adapted(rank, steps=1 if self.adaptive else None)
        task, config, facts = at_compute(control, grown.flops, self.blueprints)
        if self.adaptive:
            steps_per_epoch = config.trained_samples // config.task.batch_size
            task, _, _ = self._adapted(rank, config.env.episode_length * steps_per_epoch)
        facts |= {"rank": rank, "wanted_parameters": grown.parameters}
        return task, config, facts

    def _adapted(self, rank: int, steps: int | None) -> Control:
        """Returns the control whose adapters have ``rank``; adaptive ones have a plan for ``steps``."""
        task = self.task
        sample = task.sample.cpu()

        def build() -> Host:
            host = task.build_host()
            host.probe(sample)  # initialises lazy layers and finds the sites of a graft
            return AdaptedHost(host, rank, steps)

        transfer = take_frozen if task.trained else None
        adapted = replace(task, build_host=build, slots=None, transfer=transfer)
        config = self.config.with_values(env={"slots": None}, task={"freeze": "nothing"})
        return adapted, config, {}


class AdaptiveAdapterRunner(AdapterRunner):
    """The same with AdaLoRA, which moves ranks between layers."""

    kind = "adalora"
    adaptive = True


def take_frozen(trained: Host, host: Host) -> None:
    """Gives the host inside an adapted one its weights."""
    assert isinstance(host, AdaptedHost)
    host.take(trained)


class BiggerTrainedRunner(BiggerRunner):
    """Trains the wider host of the size to its limit from new weights, then on for as much compute: a ceiling.

    It has the training that the host had before, too.
    """

    kind = "bigger-trained"
    equal_compute = True

    def check(self) -> None:
        super().check()
        if not self.task.trained:
            raise ConfigError(f"{self.kind} has a first training, too: set task.start to trained")

    def make(self, grown: HostResult) -> Control:
        task, config, facts = super().make(grown)
        return replace(task, origin=task.build_host, trained=True), config, facts


def require_start(kind: str, task: Task) -> None:
    """Raises ConfigError if hosts of ``task`` start from new weights."""
    if task.origin is None:
        raise ConfigError(f"{kind} begins with a host that was trained before: set task.start, such as trained")


RUNNERS: tuple[type[ControlRunner], ...] = (
    StaticRunner,
    BiggerRunner,
    SameComputeRunner,
    StaticComputeRunner,
    BiggerComputeRunner,
    UniformRunner,
    Net2NetRunner,
    EnsembleRunner,
    DistilledRunner,
    AdapterRunner,
    AdaptiveAdapterRunner,
    BiggerTrainedRunner,
)
CONTROLS = {runner.kind: runner for runner in RUNNERS}
"""Arms that are made from the results of another arm."""
