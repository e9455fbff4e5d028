"""One training step of one host with its seeds, and an epoch of them.

The host trains on its own loss. A seed in TRAINING is incubated: it sees the host's features detached and trains on its
shadow loss, the loss of the rest of the host run on h + alpha_target · d(h), or straight through the host's own pass
(``env.incubation``). Host output, gradients and buffers are the same bits as without it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from esper.data.task import Split
from esper.hosts.host import At
from esper.ops import GradStats, grad_stats
from esper.seeds.slot import SeedSlot
from esper.seeds.stage import SeedStage
from esper.training.env_state import ParallelEnvState, ParameterGroup
from esper.training.loss import correct_of, count_of, mean_loss

EXPLODING = 10.0
"""A gradient tensor explodes above this multiple of the clip norm."""


def train_epoch(env: ParallelEnvState) -> None:
    """floor(samples / batch) steps over the env's own permutation of the training set; results stay on the device."""
    config, split = env.config.task, env.task.train
    assert isinstance(split, Split)
    assert config.batch_size is not None
    assert config.samples_per_epoch is not None
    groups = begin_epoch(env)
    order = torch.randperm(len(split), generator=env.order)[: config.samples_per_epoch].to(env.device)
    for env.batch in range(config.samples_per_epoch // config.batch_size):
        rows = order[env.batch * config.batch_size : (env.batch + 1) * config.batch_size]
        train_step(env, groups, split.x[rows], split.y[rows])
    env.epoch += 1


def begin_epoch(env: ParallelEnvState) -> list[ParameterGroup]:
    """Everything ready for the first step of an epoch; returns what its steps will move."""
    env.host.train()
    env.row.zero_()
    env.set_learning_rate()
    groups = env.learning_groups()
    env.collector.begin(tuple(group.name for group in groups))
    return groups


def train_step(env: ParallelEnvState, groups: list[ParameterGroup], x: Tensor, y: Tensor) -> None:
    """Forward, loss, backward, shadow losses, statistics, clipped step: inputs x [B, ...], targets y [B] or [B, T]."""
    for group in groups:
        group.optimizer.zero_grad(set_to_none=True)
    features: dict[int, Tensor] = {}
    with env.own_randomness():
        logits = env.host.walk(x, blending(env, features))
    loss = mean_loss(logits, y)
    if loss.requires_grad:  # a frozen host before any seed of it learns has nothing to do
        loss.backward()  # type: ignore[no-untyped-call]
    for site, h in features.items():
        shadow_gradients(env, site, x, h, y)
    stats = grad_stats(
        ([p.grad for p in group.parameters] for group in groups),
        max_norm=env.config.task.max_grad_norm,
        exploding_norm=EXPLODING * env.config.task.max_grad_norm,
    )
    env.collector.add(stats)
    step_groups(groups, stats)
    accumulate(env.row, loss.detach(), logits.detach(), y)


def blending(env: ParallelEnvState, features: dict[int, Tensor] | None = None, judge: bool = True) -> At:
    """What happens at a site in training: out = h + alpha · d(h) for a blended seed.

    The identity path stays open, so no stage cuts the gradient of the host. The features at each slot with an
    incubating seed go, detached, into ``features`` by site number where it is given.
    """

    def at(site: int, h: Tensor) -> Tensor:
        slot = env.slots[site]
        if slot.incubating and features is not None:
            if env.config.env.incubation == "ste":
                return straight_through(env, slot, h)
            features[site] = env.host.kept(h.detach())
        elif slot.blended:
            return torch.add(h, delta_of(slot, h, judge), alpha=slot.alpha.alpha)
        return h

    return at


def straight_through(env: ParallelEnvState, slot: SeedSlot, h: Tensor) -> Tensor:
    """out = h + (d − stop_grad(d)) with d = d(stop_grad(h)): the bits of h, and ∂loss/∂out as the gradient of d.

    That objective is linear in d and rewards its size without end. So d is scaled to RMS(d) ≤ RMS(h), with the gradient
    going through the scale: at the limit it can turn, but gains nothing by growing. Steps aside still make it longer,
    a little each, so beyond the limit it is also drawn back, by as much of the gradient's norm as it is too large.
    """
    features = h.detach()
    with env.draws_of(slot):
        d = delta_of(slot, features)
    size = d.detach().norm()
    ratio = size / features.norm().clamp(min=1e-30)
    back = (ratio - 1).clamp(min=0) * d.detach() / size.clamp(min=1e-30)
    d.register_hook(lambda gradient: gradient + gradient.norm() * back)  # type: ignore[no-untyped-call]
    d = d * (features.pow(2).mean() / d.pow(2).mean().clamp(min=1e-30)).sqrt().clamp(max=1)
    return h + (d - d.detach())


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


def shadow_gradients(env: ParallelEnvState, site: int, x: Tensor, h: Tensor, y: Tensor) -> None:
    """Gradients of the shadow loss for the one seed at ``site``, which features h of the inputs x reach; other
    incubating seeds are absent."""
    slot = env.slots[site]
    assert slot.seed is not None
    parameters = [parameter for parameter in slot.seed.parameters() if parameter.requires_grad]
    with env.apart(slot):
        grown = torch.add(h, delta_of(slot, h), alpha=slot.incubation_target)
        loss = mean_loss(env.host.resume(x, site, grown, blending(env, judge=False)), y)
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
    correct, count = correct_of(logits, y).sum(dtype=torch.float64), count_of(y).double()
    row.add_(torch.stack((loss.double() * count, correct, count, ~loss.isfinite())))
