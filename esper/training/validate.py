"""Validation of one host in several configurations at once.

A configuration is an alpha for each site, 0 if the seed is absent. Configurations form a tree: those that agree up to a
site share the computation before it, so nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.core.blend import blend
from esper.core.place import Features
from esper.core.site import Site
from esper.data.split import Split
from esper.hosts.host import kept_modes
from esper.ops.accumulators import ACCUMULATOR_FIELDS
from esper.training.batches import upload
from esper.training.delta import delta_of
from esper.training.host_training import HostTraining
from esper.training.metrics import EpochMetrics, make_metrics

Configuration = tuple[float, ...]

LOSS_SUM = ACCUMULATOR_FIELDS.index("loss_sum")
CORRECT = ACCUMULATOR_FIELDS.index("correct")
COUNT = ACCUMULATOR_FIELDS.index("count")


@dataclass(frozen=True)
class Evaluation:
    """Results of K configurations on n samples, on the device."""

    stats: Tensor
    """Sums over the samples, float64 [K, 5], named by ``ACCUMULATOR_FIELDS``."""
    correct: Tensor
    """Score of each sample, [K, n], see ``EpochMetrics.correct``."""
    points: float = 100.0
    """Percentage points in a unit of the score."""

    @property
    def loss(self) -> Tensor:
        """Mean loss, float64 [K]."""
        return self.stats[:, LOSS_SUM] / self.stats[:, COUNT]

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """Accuracy or other score, pp [K]; waits for the device."""
        points = self.points * self.stats[:, CORRECT] / self.stats[:, COUNT]
        return np.asarray(points.cpu())


def evaluate(
    training: HostTraining,
    split: Split,
    configurations: list[Configuration],
    totals: EpochMetrics | None = None,
) -> Evaluation:
    """Evaluates the host on ``split`` in each distinct configuration, sharing common prefixes; no site is changed.

    Results are written into ``totals``, which must have room for these configurations and samples; None allocates new
    ones.
    """
    count = len(configurations)
    sums = totals or make_metrics(1, training.device, count, len(split), training.task.objective.dtype)[0]
    sums.stats(count).zero_()  # the scores of samples are overwritten anyway
    upload(torch.tensor(configurations).view(count, len(training.sites)), training.tried[:count])

    work = partial(_evaluate_into, training, split, configurations, sums)
    if totals is None or not split.in_memory:  # a captured pass would not read
        work()
    else:  # into the same memory each time
        key = ("validation", id(split), _branching(configurations))
        training.repeat(key, work)
    return Evaluation(sums.stats(count), sums.correct(count), training.task.points)


def all_off(training: HostTraining) -> Configuration:
    """The configuration of the host without seeds."""
    return (0.0,) * len(training.sites)


def committed_configuration(training: HostTraining) -> Configuration:
    """The configuration with fossils only: the network that remains if the episode ends now."""
    return tuple(site.alpha if site.fossil else 0.0 for site in training.sites)


def _branching(configurations: list[Configuration]) -> tuple[tuple[int, ...], ...]:
    """The shape of the tree: by site, the index of the first configuration with the same alpha, −1 for 0."""
    shape = []
    for alphas in zip(*configurations, strict=True):
        firsts = tuple(alphas.index(alpha) if alpha else -1 for alpha in alphas)
        shape.append(firsts)
    return tuple(shape)


def _evaluate_into(
    training: HostTraining,
    split: Split,
    configurations: list[Configuration],
    totals: EpochMetrics,
) -> None:
    """Evaluates into the first rows of ``totals``, with the alphas in the same rows of ``tried``."""
    if training.native is not None and split.in_memory:
        done = training.native.evaluate(split, configurations, _branching(configurations), totals)
        if done:
            return
    alphas = training.tried[: len(configurations)]  # [K, S]
    tree = _Tree(training, configurations, alphas)
    with _evaluating(training), training.arithmetic.casting():
        objective = training.task.objective
        size = training.task.evaluation_batch
        for start in range(0, len(split), size):
            stop = start + size
            x = split.inputs(start, stop, training.arithmetic.image_dtype)
            y = split.y[start:stop]
            for number, logits in enumerate(tree.walk(x)):
                objective.measure_into(logits, y, totals.accumulators, totals.place, 1 + number, start)


@dataclass
class _Tree:
    """The tree of configurations, which batches of inputs are passed through."""

    training: HostTraining
    configurations: list[Configuration]
    alphas: Tensor
    """Those of the configurations, which define the tree, [K, S] on the device."""

    @cached_property
    def vacant(self) -> set[int]:
        """Sites at which every alpha is 0."""
        vacant = set(range(len(self.training.sites)))
        for configuration in self.configurations:
            for site, alpha in enumerate(configuration):
                if alpha:
                    vacant.discard(site)
        return vacant

    def walk(self, x: Tensor) -> list[Tensor]:
        """Returns the logits of every configuration for inputs ``x``, in order."""
        count = len(self.configurations)
        results = {}
        # Depth first, in the order in which the passes leave one another.
        waiting = [_Pass(self, list(range(count)), -1, None, True)]
        while waiting:
            current = waiting.pop()
            logits = current.run(x)
            for member in current.members:
                results[member] = logits
            waiting.extend(reversed(current.branches))
        return [results[member] for member in range(count)]


@dataclass
class _Pass:
    """One forward pass, from where some configurations have left the others to the end of the network."""

    tree: _Tree
    members: list[int]
    """Numbers of these configurations; those that agree with the first one to the end are left at last."""
    start: int
    """Number of the site at which they have left the others; −1 before all."""
    at: Features | None
    """Features after that site; None: the pass starts from the inputs."""
    track_finite: bool
    """As for :func:`delta_of`."""
    branches: list[_Pass] = field(default_factory=list)
    """Passes of those that leave this one on the way, in this order."""
    tried: set[Site] = field(default_factory=set)
    """Sites of incubating seeds that have acted."""
    trial: ExitStack = field(default_factory=ExitStack)
    """Lends incubating seeds their buffers until the pass ends."""

    def run(self, x: Tensor) -> Tensor:
        """Returns the logits of the members that are left at the end, for inputs ``x``."""
        tree = self.tree
        training = tree.training
        with self.trial:
            if self.at is None:
                return training.host.forward_with_hook(x, self._at_site, tree.vacant)
            # Seeds up to that site have acted in the pass that this one has left.
            alphas = tree.configurations[self.members[0]]
            for site, alpha in zip(training.sites[: self.start + 1], alphas, strict=False):
                if alpha:
                    self._begin_trial(site)
            return training.host.forward_from(x, self.start, self.at, self._at_site, tree.vacant)

    def _begin_trial(self, site: Site) -> None:
        """After an incubating seed: uses its buffers, and no longer marks later seeds, which it may break."""
        if not site.incubating or site in self.tried:
            return
        self.tried.add(site)
        self.track_finite = False
        training = self.tree.training
        if training.config.env.incubation == "shadow":
            self.trial.enter_context(training.shadow_of(site).in_place())

    def _at_site(self, number: int, arriving: Features) -> Tensor:
        """Goes on with the members that have the first one's alpha; the others branch off."""
        training = self.tree.training
        site = training.sites[number]
        # All members have the same features here, so the seed runs once.
        by_alpha: dict[float, list[int]] = {}
        for member in self.members:
            alpha = self.tree.configurations[member][number]
            by_alpha.setdefault(alpha, []).append(member)
        delta = None
        if site.seed is not None and any(by_alpha):  # any alpha but 0
            delta = delta_of(site, arriving, self.track_finite)

        def leaving(alpha: float, members: list[int]) -> Tensor:
            if delta is None or not alpha:
                return arriving.h
            return blend(arriving.h, delta, self.tree.alphas[members[0], number])

        first, *others = by_alpha.items()
        for alpha, members in others:
            at = arriving.with_sink(leaving(alpha, members)).each(training.host.protected)
            self.branches.append(_Pass(self.tree, members, number, at, self.track_finite))
        alpha, self.members = first
        if delta is not None and alpha:
            self._begin_trial(site)
        return leaving(alpha, self.members)


@contextmanager
def _evaluating(training: HostTraining) -> Iterator[None]:
    """Runs a block with host and seeds in eval mode, without gradients."""
    modules = [training.host, *training.seeds()]
    with kept_modes(*modules), training.host.without_gradients():
        for module in modules:
            module.eval()
        yield
