"""Other uses of the price of growing: controls that compute as much as the grown host, and the table of all controls.

The schedule of each fits in the epochs that its compute allows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace

from esper.config import ConfigError
from esper.data.task import Task
from esper.env.make import EnvMaker
from esper.evaluation.controls import (
    BiggerRunner,
    Control,
    ControlRunner,
    SameComputeRunner,
    StaticRunner,
    at_compute,
)
from esper.evaluation.runner import HostResult
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

    def make(self, grown: HostResult) -> Control:
        return at_compute(super().make(grown), grown.flops, self.blueprints)


class BiggerComputeRunner(BiggerRunner):
    """Trains the wider host of the size from new weights, for as much compute."""

    kind = "bigger-compute"

    def make(self, grown: HostResult) -> Control:
        return at_compute(super().make(grown), grown.flops, self.blueprints)


class UniformRunner(StaticRunner):
    """Trains the host with the same seed in every slot of one row from the start, for as much compute.

    Of all rows and blueprints, it has those whose number of parameters is nearest to the grown host's.
    """

    kind = "uniform"

    def make(self, grown: HostResult) -> Control:
        wanted = grown.parameters - self.host.parameter_count
        sizes = self._sizes()
        if not sizes:
            raise ConfigError("uniform: no blueprint fits in every slot of a row")
        row, name = min(sizes, key=lambda choice: abs(sizes[choice] - wanted))
        kept = {place.name: KeptSeed(name, "LINEAR_ADD", 1.0) for place in self._rows()[row]}
        return at_compute(self.built_in(kept), grown.flops, self.blueprints)

    def _rows(self) -> Mapping[str, list[Place]]:
        rows = defaultdict(list)
        for place in self.host.sites:
            rows[place.name.partition("c")[0]].append(place)
        return rows

    def _sizes(self) -> dict[tuple[str, str], int]:
        """Returns the number of parameters of a seed of each blueprint in every slot of a row, by (row, blueprint)."""
        sizes = {}
        for row, places in self._rows().items():
            fitting = [self.blueprints.fitting(self.host.topology, place) for place in places]
            for name in set.intersection(*(set(found) for found in fitting)):
                pairs = zip(fitting, places, strict=True)
                sizes[row, name] = sum(found[name].size(place) for found, place in pairs)
        return dict(sorted(sizes.items()))


class Net2NetRunner(BiggerRunner):
    """Trains the wider host of the size, which begins with the function of the host, for as much compute.

    Raises ConfigError for hosts other than chains of layers.
    """

    kind = "net2net"

    def __init__(self, maker: EnvMaker, control_of: str, run_seed: int) -> None:
        super().__init__(maker, control_of, run_seed)
        require_start(self.kind, self.task)
        with seeded(0):
            widen_as_copies(self.host, self._nearest(self.host.parameter_count)())

    def make(self, grown: HostResult) -> Control:
        task, config, facts = super().make(grown)
        if self.task.trained:  # its weights are known only when an episode starts
            task = replace(task, origin=self.task.origin, trained=True, transfer=widen_as_copies)
        else:
            task = replace(task, build_host=_widened(self.task.build_host, task.build_host))
        return at_compute((task, config, facts), grown.flops, self.blueprints)


def _widened(build_narrow: Callable[[], Host], build_wide: Callable[[], Host]) -> Callable[[], Host]:
    """Returns a factory of wide hosts with the function of narrow ones."""

    def build() -> Host:
        narrow, wide = build_narrow(), build_wide()
        widen_as_copies(narrow, wide)
        return wide

    return build


class BesideRunner(ControlRunner):
    """Base class of controls in which another network learns beside the host that was trained before."""

    network: type[BesideHost]

    def __init__(self, maker: EnvMaker, control_of: str, run_seed: int) -> None:
        super().__init__(maker, control_of, run_seed)
        require_start(self.kind, self.task)
        if self.task.loss != "cross_entropy":
            raise ConfigError(f"{self.kind} joins probabilities of classes, but {self.task.name} has another loss")

    def beside(self, build_learner: Callable[[], Host], grown: HostResult) -> Control:
        """Returns the control in which what ``build_learner`` makes learns beside the host."""
        first = self.task.build_host
        sample = self.task.sample

        def build() -> Host:
            host = self.network(first(), build_learner())
            host.probe(sample)
            return host

        task = replace(self.task, build_host=build, slots=None)
        config = self.config.with_values(env={"slots": None}, task={"freeze": "nothing"})
        return at_compute((task, config, {}), grown.flops, self.blueprints)


class EnsembleRunner(BesideRunner):
    """Trains a second host from new weights for as much compute, and averages the probabilities of both."""

    kind = "ensemble"
    network = Ensemble

    def make(self, grown: HostResult) -> Control:
        return self.beside(self.task.from_new_weights().build_host, grown)


class DistilledRunner(BesideRunner, BiggerRunner):
    """Trains the wider host of the size from new weights and the outputs of the host, for as much compute."""

    kind = "distilled"
    network = Distilled

    def make(self, grown: HostResult) -> Control:
        return self.beside(self._nearest(int(grown.parameters)), grown)


class AdapterRunner(ControlRunner):
    """Trains LoRA adapters of PEFT beside the frozen host, and its last layer, for as much compute.

    Their rank is the one whose number of parameters is nearest to what the grown host has more than the host.
    """

    kind = "lora"
    adaptive = False

    def __init__(self, maker: EnvMaker, control_of: str, run_seed: int) -> None:
        super().__init__(maker, control_of, run_seed)
        require_start(self.kind, self.task)
        if self.adaptive and self.task.device.type == "cuda":
            raise ConfigError(f"{self.kind} counts its steps in Python, which captured steps do not: run.device=cpu")
        import_peft()
        self._of_rank = size_of_rank(self.host)

    def make(self, grown: HostResult) -> Control:
        rank = max(1, round((grown.parameters - self.host.parameter_count) / self._of_rank))
        # What a pass costs does not depend on the number of steps, which is known only afterwards.
        first = self._adapted(rank, 1 if self.adaptive else None)
        task, config, facts = at_compute(first, grown.flops, self.blueprints)
        if self.adaptive:
            steps = config.env.episode_length * (config.trained_samples // config.task.batch_size)
            task = self._adapted(rank, steps)[0]
        return task, config, {**facts, "rank": rank, "wanted_parameters": grown.parameters}

    def _adapted(self, rank: int, steps: int | None) -> Control:
        """Returns the control whose adapters have ``rank``; adaptive ones have a plan for ``steps``."""
        task = self.task
        sample = task.sample.cpu()

        def build() -> Host:
            host = task.build_host()
            host.probe(sample)  # initialises lazy layers and finds the sites of a graft
            return AdaptedHost(host, rank, steps)

        transfer = take_frozen if task.trained else None
        control = replace(task, build_host=build, slots=None, transfer=transfer)
        return control, self.config.with_values(env={"slots": None}, task={"freeze": "nothing"}), {}


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

    def __init__(self, maker: EnvMaker, control_of: str, run_seed: int) -> None:
        super().__init__(maker, control_of, run_seed)
        if not self.task.trained:
            raise ConfigError(f"{self.kind} has a first training, too: set task.start to trained")

    def make(self, grown: HostResult) -> Control:
        task, config, facts = super().make(grown)
        task = replace(task, origin=task.build_host, trained=True)
        return at_compute((task, config, facts), grown.flops, self.blueprints)


def require_start(kind: str, task: Task) -> None:
    """Raises ConfigError if hosts of ``task`` start from new weights."""
    if task.origin is None:
        raise ConfigError(f"{kind} begins with a host that was trained before: set task.start, such as trained")


CONTROLS: dict[str, type[ControlRunner]] = {
    runner.kind: runner
    for runner in (
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
}
"""Arms that are made from the results of another arm."""
