"""One training step of one host with its seeds, and an epoch of them.

The host trains on its own loss. A seed in TRAINING is incubated: it sees the host's features detached and trains on its
shadow loss, the loss of the rest of the host run on h + alpha_target · d(h), or straight through the host's own pass
(``env.incubation``). Host output, gradients and buffers are the same bits as without it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from esper.hosts.host import At
from esper.ops import GradStats, grad_stats, sgd_step
from esper.seeds.blend import blend
from esper.seeds.slot import SeedSlot
from esper.seeds.stage import SeedStage
from esper.training.env_state import ParallelEnvState
from esper.training.lanes import Cancelled
from esper.training.loss import count_of, measured_loss
from esper.training.precision import Arithmetic
from esper.training.storage import ParameterGroup

EXPLODING = 10.0
"""A gradient tensor explodes above this multiple of the clip norm."""


def train_epoch(env: ParallelEnvState, cancelled: Callable[[], bool] = lambda: False) -> None:
    """floor(samples / batch) steps over the env's own permutation of the training set; results stay on the device.

    Raises Cancelled between two steps once ``cancelled`` says so.
    """
    assert env.feed is not None
    groups = begin_epoch(env)
    env.feed.begin(env.epoch, env.order)
    for number in range(env.feed.batches):
        if cancelled():
            raise Cancelled(f"env {env.index}, epoch {env.epoch}: cancelled before batch {number}")
        env.batch = number
        x, y = env.feed.batch(number)
        train_step(env, groups, x, y)
    env.epoch += 1


def begin_epoch(env: ParallelEnvState) -> list[ParameterGroup]:
    """Everything ready for the first step of an epoch; returns what its steps will move."""
    env.host.train()
    env.totals.zero_training()
    env.set_learning_rate()
    env.set_alphas()
    env.begin_shadows()
    groups = env.learning_groups()
    env.collector.begin(tuple(group.name for group in groups))
    return groups


def train_step(env: ParallelEnvState, groups: list[ParameterGroup], x: Tensor, y: Tensor) -> None:
    """Forward, loss, backward, shadow losses, statistics, clipped step: inputs x [B, ...], targets y [B] or [B, T]."""
    for parameter in (parameter for group in groups for parameter in group.parameters):
        parameter.grad = None
    parts = env.micro_batches
    whole = count_of(y) if parts > 1 else None
    for env.part, (part_x, part_y) in enumerate(zip(x.tensor_split(parts), y.tensor_split(parts), strict=True)):
        add_gradients(env, part_x, part_y, None if whole is None else count_of(part_y) / whole)
    env.arithmetic.unscale(group.optimizer for group in groups)
    stats = grad_stats(
        ([p.grad for p in group.parameters] for group in groups),
        max_norm=env.config.task.max_grad_norm,
        exploding_norm=EXPLODING * env.config.task.max_grad_norm,
        device=env.device,
    )
    excused = env.arithmetic.excuses(stats.clip_coef > 0)
    env.collector.add(stats, excused)
    step_groups(groups, stats, excused)
    env.arithmetic.update()


def add_gradients(env: ParallelEnvState, x: Tensor, y: Tensor, share: Tensor | None) -> None:
    """Gradients of the loss and of the shadow losses of one part of a batch, whose mean counts by its ``share``."""
    features: dict[int, Tensor] = {}
    with env.own_randomness(), env.arithmetic.casting():
        logits = env.host.walk(x, blending(env, features), env.vacant)
    measured = measured_loss(logits, y)
    env.totals.add_training(measured.stats)
    loss = measured.loss if share is None else measured.loss * share
    if loss.requires_grad:  # a frozen host before any seed of it learns has nothing to do
        env.arithmetic.scaled(loss).backward()  # type: ignore[no-untyped-call]
    for site, h in features.items():
        shadow_gradients(env, site, x, h, y, share)


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
            return blend(h, delta_of(slot, h, judge, env.arithmetic), env.alphas[0, site])
        return h

    return at


def straight_through(env: ParallelEnvState, slot: SeedSlot, h: Tensor) -> Tensor:
    """out = h + (d − stop_grad(d)) with d = d(stop_grad(h)): the bits of h, and ∂loss/∂out as the gradient of d.

    That objective is linear in d and rewards its size without end. So d is scaled to RMS(d) ≤ RMS(h), with the gradient
    going through the scale: at the limit it can turn, but gains nothing by growing. Steps aside still make it longer,
    a little each, so beyond the limit it is also drawn back, by as much of the gradient's norm as it is too large.
    In micro-batches these sizes are those of a part.
    """
    features = h.detach()
    with env.draws_of(slot):
        d = delta_of(slot, features)
    d = d.to(torch.promote_types(d.dtype, torch.float32))  # its size is a sum over all of it
    size = d.detach().norm()
    ratio = size / features.to(d.dtype).norm().clamp(min=1e-30)
    back = (ratio - 1).clamp(min=0) * d.detach() / size.clamp(min=1e-30)
    d.register_hook(lambda gradient: gradient + gradient.norm() * back)  # type: ignore[no-untyped-call]
    d = d * (features.to(d.dtype).pow(2).mean() / d.pow(2).mean().clamp(min=1e-30)).sqrt().clamp(max=1)
    return h + (d - d.detach()).to(h.dtype)


def delta_of(slot: SeedSlot, h: Tensor, judge: bool = True, arithmetic: Arithmetic | None = None) -> Tensor:
    """d(h), [B, ...] as h; for a living seed, zero from the moment it is non-finite.

    The cut is made on the device, forward and backward, without a sync; with ``where`` and not with a product, because
    0 · NaN is NaN. A fossil is part of the host, and the governor's to judge. ``judge`` is False where h has passed an
    incubating seed: what that one does to seeds behind it is not their fault, and one of these that the host's own pass
    has found to be broken is absent. Gradients are of a loss that ``arithmetic`` may have scaled.
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
                found = _all_finite(gradient)
                excused = None if arithmetic is None else arithmetic.excuses(found)
                finite.logical_and_(found if excused is None else found | excused)
            return torch.where(finite, gradient, 0.0)

        entry.register_hook(cut)  # type: ignore[no-untyped-call]
    delta = slot.seed(entry).to(h.dtype)  # which may hold less than the seed makes
    if judge:
        finite.logical_and_(_all_finite(delta.detach()))
    return torch.where(finite, delta, 0.0)


def _all_finite(values: Tensor) -> Tensor:
    """Whether the sum of ``values`` is finite, which with room to spare means all of them, bool []."""
    return torch.isfinite(values.sum(dtype=torch.promote_types(values.dtype, torch.float32)))


def shadow_gradients(
    env: ParallelEnvState, site: int, x: Tensor, h: Tensor, y: Tensor, share: Tensor | None = None
) -> None:
    """Gradients of the shadow loss for the one seed at ``site``, which features h of the inputs x reach; other
    incubating seeds are absent."""
    slot = env.slots[site]
    assert slot.seed is not None
    parameters = [parameter for parameter in slot.seed.parameters() if parameter.requires_grad]
    with env.apart(slot), env.arithmetic.casting():
        grown = blend(h, delta_of(slot, h), env.alphas[1, site])
        logits = env.host.resume(x, site, grown, blending(env, judge=False), env.vacant)
    loss = measured_loss(logits, y).loss
    loss = env.arithmetic.scaled(loss if share is None else loss * share)
    loss.backward(inputs=parameters)  # type: ignore[no-untyped-call]


def step_groups(groups: list[ParameterGroup], stats: GradStats, excused: Tensor | None) -> None:
    """Clip and step every group; one whose gradient is not finite stays as it is, and its seed is marked unless it is
    ``excused``, bool [G].

    The optimizers multiply gradients by the clip coefficient, 0 where they are not finite, and read it from device
    memory: clipping costs no pass of its own and no synchronisation.
    """
    sgd_step([group.optimizer for group in groups], stats.clip_coef)
    sound = stats.clip_coef > 0 if excused is None else (stats.clip_coef > 0) | excused  # [G]
    for index, group in enumerate(groups):
        if group.slot is not None and group.slot.finite is not None:
            group.slot.finite.logical_and_(sound[index])
