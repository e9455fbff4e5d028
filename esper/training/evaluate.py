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

from esper.data.task import Split
from esper.training.env_state import ParallelEnvState
from esper.training.host_step import delta_of
from esper.training.loss import correct_of, count_of, mean_loss

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


def evaluate(env: ParallelEnvState, split: Split, configurations: list[Configuration]) -> Evaluation:
    """Run the env's host on ``split`` once for each distinct configuration, sharing common prefixes.

    Alphas are arguments of this pass; no slot is changed.
    """
    parts: list[Tensor] = []
    total = torch.zeros(len(configurations), dtype=torch.float64, device=env.device)
    with _evaluating(env):
        for start in range(0, len(split), env.task.evaluation_batch):
            rows = slice(start, start + env.task.evaluation_batch)
            x, y = split.x[rows], split.y[rows]
            results = _walk_tree(env, x, configurations)
            parts.append(torch.stack([correct_of(logits, y) for logits in results]))
            total += torch.stack([mean_loss(logits, y) for logits in results]).double() * count_of(y)
    return Evaluation(torch.cat(parts, dim=1), total / split.counts.sum(), split.counts)


def _walk_tree(env: ParallelEnvState, x: Tensor, configurations: list[Configuration]) -> list[Tensor]:
    """Logits of every configuration, in their order."""
    results: dict[int, Tensor] = {}

    def follow(members: list[int], site: int, h: Tensor, judge: bool) -> None:
        """All ``members`` leave ``site`` with features ``h`` (-1: the inputs). Follow the first to its end; those that
        part from it on the way are followed from where they do."""
        branches: list[tuple[list[int], int, Tensor, bool]] = []
        with ExitStack() as trial:

            def at(reached: int, arriving: Tensor) -> Tensor:
                nonlocal members, judge
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
                if slot.incubating:  # from here on the trial's own buffers; what it does to later seeds is its fault
                    trial.enter_context(env.shadow_of(slot).in_place())
                    judge = False
                return torch.add(arriving, delta, alpha=alpha)

            if site >= 0 and env.slots[site].incubating and configurations[members[0]][site]:
                trial.enter_context(env.shadow_of(env.slots[site]).in_place())
                judge = False
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
        with torch.inference_mode():
            yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.train(training)


def committed_configuration(env: ParallelEnvState) -> Configuration:
    """Fossils only: the network that would be kept if the episode ended now."""
    fossils = env.fossils()
    return tuple(slot.alpha.alpha if slot in fossils else 0.0 for slot in env.slots)
