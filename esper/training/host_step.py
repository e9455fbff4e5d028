"""One training step of one host with its seeds, and an epoch of them.

The host trains on its own loss. A seed in TRAINING is incubated: it sees the host's features detached and trains on its
shadow loss, the loss of the rest of the host run on h + alpha_target · d(h). Host output, gradients and buffers are the
same bits as without it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.ops import GradStats, grad_stats
from esper.seeds.slot import SeedSlot
from esper.seeds.stage import SeedStage
from esper.training.env_state import ParallelEnvState, ParameterGroup

EXPLODING = 10.0
"""A gradient tensor explodes above this multiple of the clip norm."""


def train_epoch(env: ParallelEnvState) -> None:
    """floor(samples / batch) steps over the env's own permutation of the training set; results stay on the device."""
    config, split = env.config.task, env.task.train
    assert config.batch_size is not None
    assert config.samples_per_epoch is not None
    env.host.train()
    env.row.zero_()
    env.set_learning_rate()
    groups = env.learning_groups()
    env.collector.begin(tuple(group.name for group in groups))
    order = torch.randperm(len(split), generator=env.order)[: config.samples_per_epoch].to(env.device)
    for env.batch in range(config.samples_per_epoch // config.batch_size):
        rows = order[env.batch * config.batch_size : (env.batch + 1) * config.batch_size]
        train_step(env, groups, split.x[rows], split.y[rows])
    env.epoch += 1


def train_step(env: ParallelEnvState, groups: list[ParameterGroup], x: Tensor, y: Tensor) -> None:
    """Forward, loss, backward, shadow losses, statistics, clipped step: inputs x [B, ...], targets y [B]."""
    for group in groups:
        group.optimizer.zero_grad(set_to_none=True)
    features: dict[int, Tensor] = {}
    logits = walk(env, x, features=features)
    loss = F.cross_entropy(logits, y)
    loss.backward()  # type: ignore[no-untyped-call]
    for site, h in features.items():
        shadow_gradients(env, site, h, y)
    stats = grad_stats(
        ([p.grad for p in group.parameters] for group in groups),
        max_norm=env.config.task.max_grad_norm,
        exploding_norm=EXPLODING * env.config.task.max_grad_norm,
    )
    env.collector.add(stats)
    step_groups(groups, stats)
    accumulate(env.row, loss.detach(), logits.detach(), y)


def walk(
    env: ParallelEnvState, h: Tensor, start: int = 0, features: dict[int, Tensor] | None = None, judge: bool = True
) -> Tensor:
    """The rest of the host from segment ``start`` on, with the blended seeds: features h to logits [B, classes].

    Blending is out = h + alpha · d(h): the identity path stays open, so no stage cuts the gradient of the host. The
    features at each slot with an incubating seed go, detached, into ``features`` by site number where it is given.
    """
    segments = env.host.segments
    for site, slot in enumerate(env.slots[start:], start):
        h = segments[site](h)
        if slot.incubating and features is not None:
            features[site] = h.detach()
        elif slot.blended:
            h = torch.add(h, delta_of(slot, h, judge), alpha=slot.alpha.alpha)
    return segments[-1](h)  # type: ignore[no-any-return]


def delta_of(slot: SeedSlot, h: Tensor, judge: bool = True) -> Tensor:
    """d(h), [B, ...] as h; for a living seed, zero from the moment it is non-finite.

    The cut is made on the device, forward and backward, without a sync; with ``where`` and not with a product, because
    0 · NaN is NaN. A fossil is part of the host, and the governor's to judge. ``judge`` is False where h has passed an
    incubating seed: what that one does to seeds behind it is not their fault, and one of these that the host's own pass
    has found to be broken is absent.
    """
    assert slot.seed is not None
    assert slot.finite is not None
    if slot.stage is SeedStage.FOSSILIZED:
        return slot.seed(h)  # type: ignore[no-any-return]
    entry, finite = h, slot.finite
    if h.requires_grad and torch.is_grad_enabled():
        entry = h.view_as(h)

        def cut(gradient: Tensor) -> Tensor:
            # The flag knows about this very delta by now, and here it learns of what flows back through the seed.
            if judge:
                finite.logical_and_(torch.isfinite(gradient.sum()))
            return torch.where(finite, gradient, 0.0)

        entry.register_hook(cut)  # type: ignore[no-untyped-call]
    delta = slot.seed(entry)
    if judge:
        finite.logical_and_(torch.isfinite(delta.detach().sum()))
    return torch.where(finite, delta, 0.0)


def shadow_gradients(env: ParallelEnvState, site: int, h: Tensor, y: Tensor) -> None:
    """Gradients of the shadow loss for the one seed at ``site``; other incubating seeds are absent."""
    slot = env.slots[site]
    assert slot.seed is not None
    parameters = [parameter for parameter in slot.seed.parameters() if parameter.requires_grad]
    with env.shadow_of(slot).in_place():
        grown = torch.add(h, delta_of(slot, h), alpha=slot.incubation_target)
        loss = F.cross_entropy(walk(env, grown, start=site + 1, judge=False), y)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def step_groups(groups: list[ParameterGroup], stats: GradStats) -> None:
    """Clip and step every group; one whose gradient is not finite stays as it is, and its seed is marked.

    The fused optimizer divides gradients by ``grad_scale`` and skips where ``found_inf`` is 1, both read from device
    memory, so clipping costs no pass of its own and no synchronisation.
    """
    coefficient = stats.clip_coef  # [G], 0 where the gradient is not finite
    usable = coefficient > 0
    scale = torch.where(usable, 1 / coefficient, 1.0).float()
    found_inf = (~usable).float()
    for index, group in enumerate(groups):
        group.optimizer.grad_scale = scale[index]  # type: ignore[attr-defined]
        group.optimizer.found_inf = found_inf[index]  # type: ignore[attr-defined]
        group.optimizer.step()
        if group.slot is not None and group.slot.finite is not None:
            group.slot.finite.logical_and_(usable[index])


def accumulate(row: Tensor, loss: Tensor, logits: Tensor, y: Tensor) -> None:
    """Add one batch to the env's row: loss sum, correct, count, non-finite losses."""
    correct = (logits.argmax(dim=1) == y).sum()
    count = len(y)
    row.add_(torch.stack((loss.double() * count, correct.double(), torch.full_like(row[0], count), ~loss.isfinite())))
