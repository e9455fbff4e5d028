"""Validation of one host in several configurations at once.

A configuration is an alpha for each site, 0 if the seed is absent. Configurations form a tree: those that agree up to a
site share the computation before it, so nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from esper.data.split import Split
from esper.hosts.host import kept_modes
from esper.ops import ACCUMULATOR_FIELDS
from esper.seeds.blend import blend
from esper.seeds.features import Features
from esper.seeds.site import Site
from esper.training.batches import upload
from esper.training.host_training import HostTraining
from esper.training.metrics import EpochMetrics, make_metrics
from esper.training.shadow import ShadowBuffers, copied_buffers
from esper.training.step import delta_of

Configuration = tuple[float, ...]

LOSS_SUM, CORRECT, COUNT = (ACCUMULATOR_FIELDS.index(name) for name in ("loss_sum", "correct", "count"))


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
        return np.asarray((self.points * self.stats[:, CORRECT] / self.stats[:, COUNT]).cpu())


def evaluate(
    training: HostTraining,
    split: Split,
    configurations: list[Configuration],
    calibrate: Tensor | None = None,
    totals: EpochMetrics | None = None,
) -> Evaluation:
    """Evaluates the host on ``split`` in each distinct configuration, sharing common prefixes; no site is changed.

    BatchNorm's statistics were gathered with the seeds on, which overstates a seed's contribution when it is switched
    off. With inputs ``calibrate`` [n, ...], they are estimated on these for each configuration separately, and nothing
    is shared. Results are written into ``totals``, which must have room for these configurations and samples; None
    allocates new ones.
    """
    count = len(configurations)
    own = totals or make_metrics(1, training.device, count, len(split), training.task.objective.dtype)[0]
    own.zero_validation(count)
    upload(torch.tensor(configurations).view(count, len(training.sites)), training.tried[:count])
    if calibrate is None:
        own_buffers = training.config.env.incubation == "shadow"

        def work() -> None:
            _evaluate_into(training, split, configurations, own, 0, own_buffers)

        if totals is None or not split.in_memory:  # a captured pass would not read
            work()
        else:  # into the same memory each time
            training.repeat(("validation", id(split), training.evaluation_batch, _branching(configurations)), work)
    else:
        for number, configuration in enumerate(configurations):
            with _calibrated(training, configuration, number, calibrate):
                _evaluate_into(training, split, [configuration], own, number, own_buffers=False)
    return Evaluation(own.stats(count), own.correct(count), training.task.points)


def _branching(configurations: list[Configuration]) -> tuple[tuple[int, ...], ...]:
    """Returns the shape of the tree: by site, the index of the first configuration with the same alpha, −1 for 0."""
    columns = zip(*configurations, strict=True)
    return tuple(tuple(column.index(alpha) if alpha else -1 for alpha in column) for column in columns)


def _evaluate_into(
    training: HostTraining,
    split: Split,
    configurations: list[Configuration],
    totals: EpochMetrics,
    first: int,
    own_buffers: bool,
) -> None:
    """Evaluates into the rows of ``totals`` from ``first`` on, with the alphas in the same rows of ``tried``."""
    alphas = training.tried[first : first + len(configurations)]  # [K, S]
    with _evaluating(training), training.arithmetic.casting():
        for start in range(0, len(split), training.evaluation_batch):
            stop = start + training.evaluation_batch
            x, y = split.inputs(start, stop, training.arithmetic.image_dtype), split.y[start:stop]
            for number, logits in enumerate(_walk_tree(training, x, configurations, alphas, own_buffers), first):
                totals.add_validation(training.task.objective, number, logits, y, start)


@contextmanager
def _calibrated(training: HostTraining, configuration: Configuration, number: int, x: Tensor) -> Iterator[None]:
    """Sets the BatchNorm statistics of the host and its seeds to those of inputs ``x`` in this configuration; restores
    them afterwards.

    The configuration's alphas are in row ``number`` of ``tried``.
    """
    seeds = [site.seed for site in training.sites if site.seed is not None]
    modules = [module for network in (training.host, *seeds) for module in network.modules()]
    layers = [module for module in modules if isinstance(module, _BatchNorm)]
    momenta = [layer.momentum for layer in layers]
    with ShadowBuffers(training.host).in_place(), copied_buffers(seeds):
        try:
            with _evaluating(training):
                for layer in layers:
                    layer.momentum = 1.0  # the statistics of x replace the running ones
                    layer.train()
                with training.arithmetic.casting():
                    _walk_tree(training, x, [configuration], training.tried[number : number + 1], own_buffers=False)
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum
        yield


def _walk_tree(
    training: HostTraining, x: Tensor, configurations: list[Configuration], alphas: Tensor, own_buffers: bool
) -> list[Tensor]:
    """Returns the logits of every configuration, in order.

    ``alphas`` [K, S] on the device are those of the ``configurations``, which define the tree. With ``own_buffers``,
    incubating seeds use their own buffers.
    """
    results: dict[int, Tensor] = {}
    vacant = [site for site in range(len(training.sites)) if not any(one[site] for one in configurations)]

    def follow(members: list[int], site: int, at: Features | None, track_finite: bool) -> None:
        """Continues all ``members`` from the pass ``at`` after ``site``; None: from the inputs.

        It runs the first one to the end, and then those that diverge on the way, each group from its branching point.
        ``track_finite`` is as for :func:`delta_of`.
        """
        branches: list[tuple[list[int], int, Features, bool]] = []
        tried = set[Site]()
        with ExitStack() as trial:

            def on_trial(seed_site: Site) -> None:
                """After an incubating seed: uses its buffers, and no longer marks later seeds, which it may break."""
                nonlocal track_finite
                if seed_site.incubating and seed_site not in tried:
                    tried.add(seed_site)
                    track_finite = False
                    if own_buffers:
                        trial.enter_context(training.shadow_of(seed_site).in_place())

            def hook(reached: int, arriving: Features) -> Tensor:
                nonlocal members
                here = training.sites[reached]
                by_alpha: dict[float, list[int]] = {}
                for member in members:
                    by_alpha.setdefault(configurations[member][reached], []).append(member)
                delta = None
                if here.seed is not None and any(by_alpha):  # any alpha but 0
                    delta = delta_of(here, arriving, track_finite)

                def leaving(alpha: float, branch: list[int]) -> Tensor:
                    if delta is None or not alpha:
                        return arriving.h
                    return blend(arriving.h, delta, alphas[branch[0], reached])

                first, *others = by_alpha.items()
                for alpha, branch in others:
                    at = arriving.with_sink(leaving(alpha, branch)).each(training.host.protected)
                    branches.append((branch, reached, at, track_finite))
                alpha, members = first
                if delta is not None and alpha:
                    on_trial(here)
                return leaving(alpha, members)

            if at is None:
                logits = training.host.forward_with_hook(x, hook, vacant)
            else:
                for number, passed in enumerate(training.sites[: site + 1]):
                    if configurations[members[0]][number]:
                        on_trial(passed)
                logits = training.host.forward_from(x, site, at, hook, vacant)
        results.update(dict.fromkeys(members, logits))
        for branch in branches:
            follow(*branch)

    follow(list(range(len(configurations))), -1, None, True)
    return [results[member] for member in range(len(configurations))]


@contextmanager
def _evaluating(training: HostTraining) -> Iterator[None]:
    """Runs a block with host and seeds in eval mode, without gradients."""
    modules = [training.host, *(site.seed for site in training.sites if site.seed is not None)]
    with kept_modes(*modules), training.host.without_gradients():
        for module in modules:
            module.eval()
        yield


def committed_configuration(training: HostTraining) -> Configuration:
    """Returns the configuration with fossils only: the network that remains if the episode ends now."""
    return tuple(site.alpha if site.fossil else 0.0 for site in training.sites)
