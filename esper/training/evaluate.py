"""Validation of one host in several configurations at once.

A configuration is an alpha for each site, 0 where the seed is absent. Configurations form a tree: all that agree up to
a site share every segment before it, so nothing is computed twice.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.data.task import Split
from esper.training.env_state import ParallelEnvState
from esper.training.host_step import delta_of

Configuration = tuple[float, ...]


@dataclass(frozen=True)
class Evaluation:
    """Per-sample results of K configurations on n samples."""

    correct: Tensor
    """uint8 [K, n]"""
    loss: Tensor
    """float64 [K], mean cross-entropy"""


def evaluate(env: ParallelEnvState, split: Split, configurations: list[Configuration]) -> Evaluation:
    """Run the env's host on ``split`` once for each distinct configuration, sharing common prefixes.

    Alphas are arguments of this pass; no slot is changed.
    """
    correct = torch.zeros(len(configurations), len(split), dtype=torch.uint8, device=env.device)
    loss = torch.zeros(len(configurations), dtype=torch.float64, device=env.device)

    def descend(site: int, h: Tensor, members: list[int], judge: bool) -> None:
        h = env.host.segments[site](h)
        if site == len(env.slots):
            correct[members] = (h.argmax(dim=1) == split.y).to(torch.uint8)
            loss[members] = F.cross_entropy(h, split.y).double()
            return
        branches: dict[float, list[int]] = {}
        for member in members:
            branches.setdefault(configurations[member][site], []).append(member)
        slot = env.slots[site]
        delta = delta_of(slot, h, judge) if any(branches) else None  # any alpha but 0
        for alpha, branch in branches.items():
            if delta is None or not alpha:
                descend(site + 1, h, branch, judge)
                continue
            with env.shadow_of(slot).in_place() if slot.incubating else nullcontext():  # a trial
                descend(site + 1, torch.add(h, delta, alpha=alpha), branch, judge and not slot.incubating)

    training = env.host.training
    env.host.eval()
    for slot in env.slots:
        if slot.seed is not None:
            slot.seed.eval()
    with torch.inference_mode():
        descend(0, split.x, list(range(len(configurations))), judge=True)
    env.host.train(training)
    for slot in env.slots:
        if slot.seed is not None:
            slot.seed.train()
    return Evaluation(correct, loss)


def committed_configuration(env: ParallelEnvState) -> Configuration:
    """Fossils only: the network that would be kept if the episode ended now."""
    fossils = env.fossils()
    return tuple(slot.alpha.alpha if slot in fossils else 0.0 for slot in env.slots)
