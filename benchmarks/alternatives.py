"""Other uses of the price of growing: controls that compute as much as the grown host.

Importing this module registers them as arms of comparisons. :mod:`benchmarks.adapters` has LoRA and AdaLoRA. Net2Net:
Chen, Goodfellow and Shlens 2016, "Net2Net: Accelerating Learning via Knowledge Transfer", section 3.2 (Net2WiderNet).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import chain, pairwise
from typing import Self

import torch
from torch import Tensor, nn

from esper.compare.controls import (
    BiggerRunner,
    Control,
    ControlRunner,
    StaticRunner,
    register,
)
from esper.compare.runner import HostResult
from esper.config import ConfigError
from esper.core.place import Features, Place
from esper.data.task import Task
from esper.hosts.grown import KeptSeed
from esper.hosts.host import Host, SiteHook, layers_of
from esper.hosts.inputs import Inputs
from esper.ops.norm_relu_pool import NormReluPool
from esper.training.rng import seeded

NOISE = 0.01
"""Std of the noise on the incoming weights of copied units, in units of the std of the layer's weights, so that a copy
and its original learn different things."""

Layer = nn.Conv2d | nn.Linear


DISTILLED_SHARE = 0.5
"""Share of the teacher's outputs in the loss of a pupil."""
TEMPERATURE = 2.0


class BesideHost(Host):
    """A network that learns, as a host with its sites, and a frozen ``host``, in eval mode.

    Args:
        host: the frozen one.
        learner: the network that learns.
    """

    def __init__(self, host: Host, learner: Host) -> None:
        super().__init__()
        self.host = host.requires_grad_(False)
        self.learner = learner
        self._take_sites()

    def _take_sites(self) -> None:
        self.sites = self.learner.sites
        self.topology = self.learner.topology
        self.in_place = self.learner.in_place

    def probe(self, x: Inputs) -> None:
        self.host.probe(x)
        self.learner.probe(x)
        self._take_sites()

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the learner."""
        super().train(mode)
        self.host.eval()
        return self

    def forward_with_hook(
        self,
        x: Inputs,
        hook: SiteHook,
        vacant: Collection[int] = (),
    ) -> Tensor:
        return self.joined(self.learner.forward_with_hook(x, hook, vacant), x)

    def forward_from(
        self,
        x: Inputs,
        site: int,
        at: Features,
        hook: SiteHook,
        vacant: Collection[int] = (),
    ) -> Tensor:
        return self.joined(self.learner.forward_from(x, site, at, hook, vacant), x)

    @abstractmethod
    def joined(self, logits: Tensor, x: Inputs) -> Tensor:
        """Returns the outputs for the learner's ``logits`` [..., classes] of inputs ``x``."""

    def old_logits(self, x: Inputs) -> Tensor:
        """Returns the outputs of the frozen host."""
        with torch.no_grad():
            return self.host.forward_with_hook(x, lambda _site, at: at.h)


class Ensemble(BesideHost):
    """The logarithm of the mean probability of both; the learner trains on its own outputs."""

    def joined(self, logits: Tensor, x: Inputs) -> Tensor:
        if self.training:
            return logits
        both = torch.stack([logits.log_softmax(-1), self.old_logits(x).log_softmax(-1)])
        return both.logsumexp(0) - math.log(2)


class Distilled(BesideHost):
    """The learner, which learns from the classes and from the outputs of the frozen host.

    Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network": the loss is (1 − λ) · CE + λ · T² ·
    KL(teacher ‖ pupil) of softmaxes at temperature T.
    """

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the learner, which is what remains."""
        return self.learner.parameter_count

    def joined(self, logits: Tensor, x: Inputs) -> Tensor:
        if not self.training or not logits.requires_grad:
            return logits
        teacher = (self.old_logits(x) / TEMPERATURE).softmax(-1)
        pupil = (logits.detach() / TEMPERATURE).softmax(-1)
        outputs = logits.numel() // logits.shape[-1]
        # ∂/∂logits of T² · KL is T · (pupil − teacher), of the mean over all outputs.
        from_teacher = TEMPERATURE * (pupil - teacher) / outputs
        share = DISTILLED_SHARE
        logits.register_hook(
            lambda gradient: (1 - share) * gradient + share * from_teacher
        )  # type: ignore[no-untyped-call]
        return logits


def take_beside(trained: Host, host: Host) -> None:
    """Gives the frozen network of a :class:`BesideHost` the weights of the trained one."""
    assert isinstance(host, BesideHost)
    ours = chain(host.host.parameters(), host.host.buffers())
    theirs = chain(trained.parameters(), trained.buffers())
    for tensor, learned in zip(ours, theirs, strict=True):
        tensor.data.copy_(learned)


@torch.no_grad()
def widen_as_copies(narrow: Host, wide: Host) -> None:
    """Overwrites the weights of ``wide`` so that it computes what ``narrow`` does, up to the noise.

    Each new unit is a copy of one that is drawn from torch's global generator, and the units that read from both share
    its outgoing weights. Hosts are chains of convolutions or linear layers with BatchNorms between them. Raises
    ConfigError for others.
    """
    small = _chain(narrow)
    large = _chain(wide)
    if list(map(type, small)) != list(map(type, large)):
        raise ConfigError(
            "net2net widens a chain of layers, and these two hosts have different ones"
        )
    last = max(number for number, layer in enumerate(small) if isinstance(layer, Layer))
    inputs = torch.arange(_inputs_of(small[0]))
    for number, (old, new) in enumerate(zip(small, large, strict=True)):
        if not isinstance(old, Layer):
            _copy_units(old, new, inputs)
            continue
        assert isinstance(new, Layer)
        width = len(old.weight)
        outputs = torch.arange(width)
        if number < last:
            added = torch.randint(width, (len(new.weight) - width,))
            outputs = torch.cat([outputs, added])
        # Units that copy the same one share what reads from it: [inputs].
        shared = torch.bincount(inputs, minlength=_inputs_of(old))[inputs]
        kernel = [1] * (old.weight.dim() - 2)
        weight = old.weight[outputs][:, inputs] / shared.view(1, -1, *kernel).to(
            old.weight
        )
        weight[width:] += NOISE * weight.std() * torch.randn_like(weight[width:])
        new.weight.copy_(weight)
        if old.bias is not None and new.bias is not None:
            new.bias.copy_(old.bias[outputs])
        inputs = outputs


def _chain(host: Host) -> list[nn.Module]:
    """Returns the layers with parameters, in execution order. Raises ConfigError if they are of other kinds."""
    layers = list(layers_of(host).values())
    known = (nn.Conv2d, nn.Linear, nn.BatchNorm2d, NormReluPool)
    weighted = [layer for layer in layers if isinstance(layer, Layer)]
    problem = ""
    for before, after in pairwise(weighted):
        if _inputs_of(after) != len(before.weight):
            problem = "layers that do not read one another"
    if not weighted:
        problem = "layers that do not read one another"
    for layer in layers:
        if not isinstance(layer, known):
            problem = f"a {type(layer).__name__}"
            break
    if problem:
        raise ConfigError(
            f"net2net widens chains of convolutions, linear layers and BatchNorms; this host has {problem}"
        )
    return layers


def _inputs_of(layer: nn.Module) -> int:
    assert isinstance(layer, Layer)
    return int(layer.weight.shape[1])


def _copy_units(old: nn.Module, new: nn.Module, units: Tensor) -> None:
    """Gives the norm ``new`` the parameters and statistics of ``old``, by unit."""
    values = dict(old.state_dict())
    for name, tensor in new.state_dict().items():
        value = values[name]
        if value.dim():
            value = value[units]
        tensor.copy_(value)


@register
class StaticComputeRunner(StaticRunner):
    """Trains the grown host's final topology, all of it together, for as much compute."""

    kind = "static-compute"
    equal_compute = True


@register
class BiggerComputeRunner(BiggerRunner):
    """Trains the wider host of the size from new weights, for as much compute."""

    kind = "bigger-compute"
    equal_compute = True


@register
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
            fitting = [
                set(self.blueprints.fitting(topology, place)) for place in places
            ]
            for name in set.intersection(*fitting):
                sizes[row, name] = sum(
                    self.blueprints.at(topology, place, name).size(place)
                    for place in places
                )
        return dict(sorted(sizes.items()))


@register
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
            task = replace(
                task, origin=self.task.origin, trained=True, transfer=widen_as_copies
            )
        else:
            task = replace(
                task, build_host=_widened(self.task.build_host, task.build_host)
            )
        return task, config, facts


def _widened(
    build_narrow: Callable[[], Host], build_wide: Callable[[], Host]
) -> Callable[[], Host]:
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
            raise ConfigError(
                f"{self.kind} joins probabilities of classes, but {self.task.name} has another loss"
            )

    def beside(self, build_learner: Callable[[], Host]) -> Control:
        """Returns the control in which a network that ``build_learner`` makes learns beside the host."""
        build_first = self.task.build_host
        sample = self.task.sample

        def build() -> Host:
            host = self.network(build_first(), build_learner())
            host.probe(sample)
            return host

        transfer = take_beside if self.task.trained else None
        task = replace(self.task, build_host=build, slots=None, transfer=transfer)
        config = self.config.with_values(
            env={"slots": None}, task={"freeze": "nothing"}
        )
        return task, config, {}


@register
class EnsembleRunner(BesideRunner):
    """Trains a second host from new weights for as much compute, and averages the probabilities of both."""

    kind = "ensemble"
    network = Ensemble

    def make(self, grown: HostResult) -> Control:
        return self.beside(self.task.from_new_weights().build_host)


@register
class DistilledRunner(BesideRunner, BiggerRunner):
    """Trains the wider host of the size from new weights and the outputs of the host, for as much compute."""

    kind = "distilled"
    network = Distilled

    def make(self, grown: HostResult) -> Control:
        return self.beside(self._nearest(int(grown.parameters)))


@register
class BiggerTrainedRunner(BiggerRunner):
    """Trains the wider host of the size to its limit from new weights, then on for as much compute: a ceiling.

    It has the training that the host had before, too.
    """

    kind = "bigger-trained"
    equal_compute = True

    def check(self) -> None:
        super().check()
        if not self.task.trained:
            raise ConfigError(
                f"{self.kind} has a first training, too: set task.start to trained"
            )

    def make(self, grown: HostResult) -> Control:
        task, config, facts = super().make(grown)
        return replace(task, origin=task.build_host, trained=True), config, facts


def require_start(kind: str, task: Task) -> None:
    """Raises ConfigError if hosts of ``task`` start from new weights."""
    if task.origin is None:
        raise ConfigError(
            f"{kind} begins with a host that was trained before: set task.start, such as trained"
        )
