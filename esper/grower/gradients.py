"""Gradients of a user's model: statistics of any kind that torch makes, and a stash for those its loop must not see."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from esper.config import TaskConfig
from esper.ops.grad_stats import FIELDS, GradStats, grad_stats
from esper.training.metrics import SeedGradientCollector

logger = logging.getLogger(__name__)

MEASURED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""Dtypes that :func:`grad_stats` reads."""
COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def measurable(gradient: Tensor) -> Tensor | None:
    """Returns the numbers of a gradient as a dense real tensor, or None if they cannot be read."""
    if type(gradient) not in (Tensor, torch.nn.Parameter):
        # A DTensor has a part of its numbers, other subclasses have numbers of a form of their own.
        return None
    values = gradient.detach()
    if values.dtype in MEASURED and values.layout is torch.strided:
        return values
    if values.layout is torch.sparse_coo:
        values = values.coalesce().values()
    elif values.layout in COMPRESSED:
        values = values.values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if values.dtype not in MEASURED or values.layout is not torch.strided:
        return None
    return values


def measure(
    owners: Sequence[Iterable[Tensor]],
    max_norm: float,
    exploding_norm: float,
    device: torch.device,
) -> GradStats:
    """Measures the gradients of each owner, on all devices that they are on.

    Gradients that cannot be measured are left out; each kind of them is logged once. Results are on ``device``, as
    those of :func:`grad_stats`, but have no ``norms``.
    """
    readable: dict[torch.device, list[list[Tensor]]] = {device: [[] for _ in owners]}
    for index, gradients in enumerate(owners):
        for gradient in gradients:
            values = measurable(gradient)
            if values is None:
                _say_left_out(type(gradient).__name__, str(gradient.dtype))
                continue
            readable.setdefault(values.device, [[] for _ in owners])[index].append(values)
    parts = []
    for place, values_by_owner in readable.items():
        stats = grad_stats(values_by_owner, max_norm, exploding_norm, device=place)
        parts.append(stats.fields.to(device))
    if len(parts) == 1:
        return GradStats(parts[0], parts[0].new_empty(0))
    return _joined(torch.stack(parts), max_norm)


def _joined(parts: Tensor, max_norm: float) -> GradStats:
    """Joins statistics of the same owners on several devices, float64 [D, G, F]."""
    fields = dict(zip(FIELDS, parts.sum(0).unbind(1), strict=True))
    by_device = dict(zip(FIELDS, parts.unbind(2), strict=True))
    tensors, norm = fields["tensors"], fields["sum_sq"].sqrt()
    finite = torch.isfinite(norm)
    # A device without gradients of an owner has a smallest norm of 0, which counts for nothing.
    smallest = torch.where(by_device["tensors"] > 0, by_device["min_norm"], torch.inf).amin(0)
    fields["min_norm"] = torch.where(tensors > 0, smallest, 0)
    fields["max_norm"] = by_device["max_norm"].amax(0)
    fields["norm"] = norm
    lost = (0.5 * fields["vanishing"] + 0.8 * fields["exploding"]) / tensors.clamp(min=1)
    fields["health"] = torch.where(finite & (tensors > 0), (1 - lost).clamp(0, 1), 0)
    fields["clip_coef"] = torch.where(finite, (max_norm / (norm + 1e-6)).clamp(max=1), 0)
    joined = torch.stack([fields[name] for name in FIELDS], dim=1)
    return GradStats(joined, joined.new_empty(0))


@cache
def _say_left_out(kind: str, dtype: str) -> None:
    logger.warning(
        "Gradients of the kind %s with %s are left out of the statistics of gradients; they train as ever.",
        kind,
        dtype,
    )


@torch.no_grad()
def clip_seeds(
    owners: Sequence[Sequence[Tensor]],
    collector: SeedGradientCollector,
    config: TaskConfig,
    scale: Tensor | None,
    scaled: bool,
) -> list[int]:
    """Clips the gradients of each seed to ``max_grad_norm``, and adds the statistics of all to ``collector``.

    Args:
        owners: parameters of the host, and of each learning seed.
        scale: divides the gradients in the step itself, as fused optimizers do; None: nothing does.
        scaled: whether a GradScaler made this step, so that gradients may overflow.

    Returns the indices of the owners whose step is to be skipped, because the scale is too large for them alone.
    """
    gradients = [[p.grad for p in parameters if p.grad is not None] for parameters in owners]
    measured = gradients
    if scale is not None:
        measured = [[gradient / scale.to(gradient.device) for gradient in of_owner] for of_owner in gradients]
    stats = measure(measured, config.max_grad_norm, config.exploding_norm, device=owners[0][0].device)
    # A branch that was left out of this step, as by LayerDrop, has no gradient that could be healthy or not.
    left_out = stats.tensors == 0
    if scaled:
        left_out = left_out | (stats.clip_coef == 0)
    collector.add(stats, left_out)
    for of_seed, factor in zip(gradients[1:], stats.clip_coef[1:], strict=True):
        if factor.is_cpu and factor.item() == 1:
            continue
        for gradient in of_seed:
            gradient.mul_(factor.to(gradient.device))
    if not scaled:
        return []
    return [index for index, factor in enumerate(stats.clip_coef.tolist()) if index and factor == 0]


class GradStash:
    """Keeps gradients of seeds out of ``parameter.grad``, which a loop may read, clip or unscale."""

    def __init__(self) -> None:
        self._gradients: dict[Tensor, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._gradients)

    def get(self, parameter: Tensor) -> Tensor | None:
        return self._gradients.get(parameter)

    def take(self, parameter: Tensor) -> None:
        """Takes a parameter's ``grad``, and adds it to what was taken before."""
        if parameter.grad is not None:
            self.add(parameter, parameter.grad)
            parameter.grad = None

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        earlier = self._gradients.get(parameter)
        if earlier is None:
            self._gradients[parameter] = gradient
        elif earlier.requires_grad or gradient.requires_grad or earlier.layout is not torch.strided:
            self._gradients[parameter] = earlier + gradient
        else:
            earlier.add_(gradient)

    def hand_back(self, scale: Tensor | None) -> None:
        """Gives the parameters their gradients, times ``scale``, a scalar; None: as they are."""
        for parameter, gradient in self._gradients.items():
            if scale is not None:
                gradient = gradient * scale.to(gradient.device)
            parameter.grad = gradient
        self._gradients.clear()

    def drop(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Forgets the gradients of these parameters, or all."""
        if parameters is None:
            self._gradients.clear()
            return
        for parameter in parameters:
            self._gradients.pop(parameter, None)
