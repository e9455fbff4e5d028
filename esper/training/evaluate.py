"""Validation of one host in several configurations at once.

A configuration is an alpha for each site, 0 where the seed is absent. Configurations form a tree: all that agree up to
a site share everything before it, so nothing is computed twice.
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

from esper.data.task import Split
from esper.seeds.slot import SeedSlot
from esper.training.env_state import ParallelEnvState
from esper.training.host_step import delta_of
from esper.training.loss import correct_of, count_of, mean_loss
from esper.training.shadow import ShadowBuffers

Configuration = tuple[float, ...]


@dataclass(frozen=True)
class Evaluation:
    """Per-sample results of K configurations on n samples."""

    correct: Tensor
    """Targets met in each sample, [K, n]: uint8 for classes, int16 for tokens."""
    loss: Tensor
    """float64 [K], mean cross-entropy"""
    counts: NDArray[np.float64]
    """Targets that count in each sample, [n]."""

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """pp [K]"""
        return np.asarray(100 * self.correct.sum(dim=1, dtype=torch.float64).cpu().numpy() / self.counts.sum())


def evaluate(
    env: ParallelEnvState, split: Split, configurations: list[Configuration], calibrate: Tensor | None = None
) -> Evaluation:
    """Run the env's host on ``split`` once for each distinct configuration, sharing common prefixes.

    Alphas are arguments of this pass; no slot is changed. BatchNorm's statistics were gathered with the seeds on, which
    flatters these when one is switched off; with inputs ``calibrate`` they are estimated anew on those, for each
    configuration by itself, and nothing is shared.
    """
    if calibrate is None:
        return _measure(env, split, configurations, trials_apart=env.config.env.incubation == "shadow")
    found = []
    for configuration in configurations:
        with _calibrated(env, configuration, calibrate):
            found.append(_measure(env, split, [configuration], trials_apart=False))
    return Evaluation(torch.cat([one.correct for one in found]), torch.cat([one.loss for one in found]), split.counts)


def _measure(
    env: ParallelEnvState, split: Split, configurations: list[Configuration], trials_apart: bool
) -> Evaluation:
    parts: list[Tensor] = []
    total = torch.zeros(len(configurations), dtype=torch.float64, device=env.device)
    with _evaluating(env):
        for start in range(0, len(split), env.task.evaluation_batch):
            rows = slice(start, start + env.task.evaluation_batch)
            x, y = split.x[rows], split.y[rows]
            results = _walk_tree(env, x, configurations, trials_apart)
            parts.append(torch.stack([correct_of(logits, y) for logits in results]))
            total += torch.stack([mean_loss(logits, y) for logits in results]).double() * count_of(y)
    return Evaluation(torch.cat(parts, dim=1), total / split.counts.sum(), split.counts)


@contextmanager
def _calibrated(env: ParallelEnvState, configuration: Configuration, x: Tensor) -> Iterator[None]:
    """The host has the BatchNorm statistics of inputs x in this configuration, and afterwards its own again."""
    layers = [module for module in env.host.modules() if isinstance(module, _BatchNorm)]
    momenta = [layer.momentum for layer in layers]
    with ShadowBuffers(env.host).in_place():
        with _evaluating(env):
            for layer in layers:
                layer.momentum = 1.0  # what x shows takes the place of what was known
                layer.train()
            _walk_tree(env, x, [configuration], trials_apart=False)
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        yield


def _walk_tree(
    env: ParallelEnvState, x: Tensor, configurations: list[Configuration], trials_apart: bool
) -> list[Tensor]:
    """Logits of every configuration, in their order; ``trials_apart``: incubating seeds use buffers of their own."""
    results: dict[int, Tensor] = {}

    def follow(members: list[int], site: int, h: Tensor, judge: bool) -> None:
        """All ``members`` leave ``site`` with features ``h`` (-1: the inputs). Follow the first to its end; those that
        part from it on the way are followed from where they do."""
        branches: list[tuple[list[int], int, Tensor, bool]] = []
        with ExitStack() as trial:

            def on_trial(slot: SeedSlot) -> None:
                """From an incubating seed on: its own buffers, and what it does to later seeds is its fault."""
                nonlocal judge
                if slot.incubating:
                    judge = False
                    if trials_apart:
                        trial.enter_context(env.shadow_of(slot).in_place())

            def at(reached: int, arriving: Tensor) -> Tensor:
                nonlocal members
                slot = env.slots[reached]
                by_alpha: dict[float, list[int]] = {}
                for member in members:
                    by_alpha.setdefault(configurations[member][reached], []).append(member)
                delta = delta_of(slot, arriving, judge) if any(by_alpha) else None  # any alpha but 0
                first, *others = by_alpha.items()
                for alpha, branch in others:
                    out = arriving if delta is None or not alpha else torch.add(arriving, delta, alpha=alpha)
                    branches.append((branch, reached, env.host.kept(out), judge))
                alpha, members = first
                if delta is None or not alpha:
                    return arriving
                on_trial(slot)
                return torch.add(arriving, delta, alpha=alpha)

            if site >= 0 and configurations[members[0]][site]:
                on_trial(env.slots[site])
            logits = env.host.walk(x, at) if site < 0 else env.host.resume(x, site, h, at)
        results.update(dict.fromkeys(members, logits))
        for branch in branches:
            follow(*branch)

    follow(list(range(len(configurations))), -1, x, True)
    return [results[member] for member in range(len(configurations))]


@contextmanager
def _evaluating(env: ParallelEnvState) -> Iterator[None]:
    """Host and seeds in eval mode, without gradients; then as they were."""
    modules = [env.host, *(slot.seed for slot in env.slots if slot.seed is not None)]
    before = [module.training for module in modules]
    for module in modules:
        module.eval()
    try:
        with env.host.without_gradients():
            yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.train(training)


def committed_configuration(env: ParallelEnvState) -> Configuration:
    """Fossils only: the network that would be kept if the episode ended now."""
    fossils = env.fossils()
    return tuple(slot.alpha.alpha if slot in fossils else 0.0 for slot in env.slots)
