"""Training steps and epochs of one host with its seeds.

The host trains on its own loss. An incubating seed sees detached features of the host and trains on its shadow loss,
the loss of the rest of the host run on h + alpha_target · d(h), or straight through the host's own pass
(``env.incubation``). The host's output, gradients and buffers are bit-identical to those without the seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from esper.core.blend import blend
from esper.core.place import Features
from esper.core.site import Role
from esper.hosts.host import SiteHook
from esper.ops.grad_stats import GradStats, grad_stats
from esper.ops.optimizer import step_all
from esper.training.batches import upload
from esper.training.delta import delta_of, straight_through
from esper.training.executor import Cancelled
from esper.training.host_training import HostTraining, feed_of, learning_groups
from esper.training.seed_pool import ParameterGroup
from esper.training.shadow import copied_buffers

ALPHA, TARGET = 0, 1
"""Rows of ``HostTraining.alphas``."""


def train_epoch(training: HostTraining, cancelled: Callable[[], bool] = lambda: False) -> None:
    """Runs floor(samples / batch) steps over a permutation of the training set; results stay on the device.

    Raises Cancelled between two steps once ``cancelled()`` is True; native passes read a flag of their own.
    """
    feed = feed_of(training)
    groups = prepare_epoch(training)
    if training.native is not None and training.native.train(groups):
        training.epoch += 1
        return
    for number in range(feed.batches):
        if cancelled():
            raise Cancelled(f"env {training.index}, epoch {training.epoch}: cancelled before batch {number}")
        training.batch = number
        x, y = feed.batch(number)
        train_step(training, groups, x, y)
    training.epoch += 1


def prepare_epoch(training: HostTraining) -> list[ParameterGroup]:
    """Prepares the first step of an epoch and returns the parameter groups that its steps update."""
    if not all(module.training for module in training.host.modules()):
        training.host.train()
    for layer in training.frozen:
        layer.eval()
    training.totals.zero_training()
    if training.feed is not None:
        training.feed.shuffle(training.epoch, training.order)

    training.warmup.start_epoch(learning_rate(training), training.epoch)
    for name, rate in training.seed_rates.items():
        planted = training.planted_at.get(name, training.epoch)
        rate.start_epoch(0.0, training.epoch - planted)  # its schedule is the host's rate

    alphas = []
    targets = []
    vacant = []
    for number, site in enumerate(training.sites):
        alphas.append(site.alpha)
        targets.append(site.target)
        if site.role is Role.ABSENT:
            vacant.append(number)
    upload(torch.tensor([alphas, targets]), training.alphas)
    training.vacant = frozenset(vacant)
    if training.config.env.incubation == "shadow":
        # Before any step, because a step that was captured with an earlier seed does not make buffers.
        for site in training.sites:
            if site.incubating:
                training.shadow_of(site)

    groups = learning_groups(training)
    training.gradient_stats.restart(tuple(group.name for group in groups))
    return groups


def learning_rate(training: HostTraining) -> float:
    """Returns lr · (1 + cos(π t/T)) / 2, with t in whole epochs of the host, also for seeds; or lr if constant.

    Without warm-up it is the rate of all steps of an epoch.
    """
    rate = training.config.task.learning_rate
    if training.config.task.schedule == "cosine":
        rate *= (1 + math.cos(math.pi * training.epoch / training.horizon)) / 2
    return rate


def train_step(
    training: HostTraining,
    groups: list[ParameterGroup],
    x: Tensor,
    y: Tensor,
) -> None:
    """Trains one batch, x [B, ...] and y [B, ...]: forward, backward, shadow losses, statistics, clipped step."""
    training.warmup.step()
    for rate in training.seed_rates.values():
        rate.step()
    for group in groups:
        group.drop_gradients()

    count = training.config.task.micro_batches
    weight = training.task.objective.weight
    # The gradient of a batch is the sum of those of its parts, each weighted by its share of the targets.
    whole = weight(y) if count > 1 else None
    parts = zip(x.tensor_split(count), y.tensor_split(count), strict=True)
    for number, (part_x, part_y) in enumerate(parts):
        training.part = number
        share = None if whole is None else weight(part_y) / whole
        add_gradients(training, part_x, part_y, share)
    training.arithmetic.unscale(group.optimizer for group in groups)

    stats = grad_stats(
        [group.gradients for group in groups],
        max_norm=training.config.task.max_grad_norm,
        exploding_norm=training.config.task.exploding_norm,
        device=training.device,
    )
    clip_with_host(groups, stats, training.config.task.max_grad_norm)
    overflowed = training.arithmetic.overflow_mask(stats.clip_coef > 0)
    training.gradient_stats.add(stats, overflowed)
    step_groups(groups, stats, overflowed)
    training.arithmetic.update()


def add_gradients(
    training: HostTraining,
    x: Tensor,
    y: Tensor,
    share: Tensor | None,
) -> None:
    """Adds the gradients of the loss and the shadow losses of one part of a batch.

    ``share`` is the part's fraction of the batch's targets, by which its mean loss is weighted; None for a whole batch.
    """
    waiting: dict[int, Features] = {}
    with training.global_draws(), training.arithmetic.casting():
        outputs = training.host.forward_with_hook(x, blending(training, waiting), training.vacant)
    mean, sums = training.task.objective.measure(outputs, y, training.config.task.label_smoothing)
    training.totals.add_training(sums)
    loss = mean if share is None else mean * share
    if loss.requires_grad:  # a frozen host has no gradient until one of its seeds learns
        training.arithmetic.scaled(loss).backward()  # type: ignore[no-untyped-call]
    for site, at in waiting.items():
        shadow_gradients(training, site, x, at, y, share)


def blending(
    training: HostTraining,
    waiting: dict[int, Features] | None = None,
    track_finite: bool = True,
) -> SiteHook:
    """Returns the function for sites in training: out = h + alpha · d(s) for a blended seed with source s.

    In the host's own pass, which has ``waiting``, an incubating seed runs straight through (``ste``), or the detached
    pass is stored in ``waiting``, by site number. In a shadow pass, without ``waiting``, incubating seeds are absent.
    ``track_finite`` is as for :func:`delta_of`.
    """

    def hook(number: int, at: Features) -> Tensor:
        site = training.sites[number]
        if site.on:
            delta = delta_of(site, at, track_finite, training.arithmetic)
            return blend(at.h, delta, training.alphas[ALPHA, number])
        if waiting is None or not site.incubating:
            return at.h
        if training.config.env.incubation == "ste":
            return straight_through(site, at, training.draws_of(site))
        waiting[number] = at.each(lambda h: training.host.protected(h.detach()))
        return at.h

    return hook


def shadow_gradients(
    training: HostTraining,
    number: int,
    x: Tensor,
    at: Features,
    y: Tensor,
    share: Tensor | None,
) -> None:
    """Adds the gradients of the shadow loss for the seed at site ``number``; other incubating seeds are absent.

    ``at`` is the detached pass of inputs ``x`` at the site; ``share`` is as for :func:`add_gradients`.
    """
    site = training.sites[number]
    parameters = [p for p in training.seed_groups[site.name].parameters if p.requires_grad]
    others = [seed for seed in training.seeds() if seed is not site.seed]
    with (
        training.shadow_of(site).in_place(),
        copied_buffers(others),
        training.draws_of(site),
        training.arithmetic.casting(),
    ):
        grown = at.with_sink(blend(at.h, delta_of(site, at), training.alphas[TARGET, number]))
        outputs = training.host.forward_from(
            x,
            number,
            grown,
            blending(training, track_finite=False),
            training.vacant,
        )
    loss, _ = training.task.objective.measure(outputs, y, training.config.task.label_smoothing)
    if share is not None:
        loss = loss * share
    # Only the seed's parameters get gradients; the host's stay as they are.
    training.arithmetic.scaled(loss).backward(inputs=parameters)  # type: ignore[no-untyped-call]


def clip_with_host(groups: list[ParameterGroup], stats: GradStats, max_norm: float) -> None:
    """Gives the host, and the seeds that are clipped with it, the clip coefficient of all their gradients together."""
    rows = [row for row, group in enumerate(groups) if row == 0 or group.with_host]
    if len(rows) == 1:
        return
    # The formula of ``grad_stats``, over the gradients of all these groups.
    norm = torch.stack([stats.sum_sq[row] for row in rows]).sum().sqrt()
    coefficient = torch.where(torch.isfinite(norm), (max_norm / (norm + 1e-6)).clamp(max=1), 0.0)
    for row in rows:  # not by a list of indices, which would be copied to a GPU
        stats.clip_coef[row].copy_(coefficient)


def step_groups(groups: list[ParameterGroup], stats: GradStats, overflowed: Tensor | None) -> None:
    """Clips and steps every group, except those with a non-finite gradient.

    The seed of such a group is marked, unless the group ``overflowed``.

    The optimizers multiply gradients by the clip coefficient, which is 0 if they are not finite, and read it from
    device memory, so that clipping needs neither a pass of its own nor a sync. ``overflowed`` [G] is as
    :meth:`Arithmetic.overflow_mask` returns it.
    """
    step_all([group.optimizer for group in groups], stats.clip_coef)

    sound = stats.clip_coef > 0  # [G]
    if overflowed is not None:
        sound = sound | overflowed
    for index, group in enumerate(groups):
        if group.site is not None and group.site.planted is not None:
            group.site.planted.finite.logical_and_(sound[index])
