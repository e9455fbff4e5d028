"""The change that a seed makes to features while it lives, d(s), and how it learns straight through the host's pass."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.core.blend import pass_through
from esper.core.place import Features
from esper.core.site import Site

if TYPE_CHECKING:
    from esper.training.precision import Arithmetic


def straight_through(
    site: Site,
    at: Features,
    randomness: AbstractContextManager[None],
) -> Tensor:
    """out = h + (d − stop_grad(d)) with d = d(stop_grad(s)) of the source s.

    It has the bits of h. :func:`pass_through` has the gradient of d, and its limit. In micro-batches the sizes that it
    compares are those of a part. The seed runs in ``randomness``.
    """
    detached = at.each(Tensor.detach)
    with randomness:
        d = delta_of(site, detached)
    return pass_through(at.h, d.to(torch.promote_types(d.dtype, torch.float32)))


def delta_of(
    site: Site,
    at: Features,
    track_finite: bool = True,
    arithmetic: Arithmetic | None = None,
) -> Tensor:
    """Returns d(s) of the seed at ``site`` for its source s, in the shape [B, ...] and dtype of the sink.

    It is zero for a living seed once it has been non-finite. Raises ValueError without a seed.

    The cut is made forward and backward, with ``where``, because 0 · NaN is NaN; on a GPU without a sync, while a CPU
    reads at once that there is nothing to cut. A fossil is part of the host and is left to the governor.

    ``track_finite``: whether non-finite values mark the seed. It is False after an incubating seed, which may have
    caused them; a seed that the host's own pass has marked is still absent. ``arithmetic`` may have scaled the loss.
    """
    seed = site.planted
    if seed is None:
        raise ValueError(f"{site.name} has no seed")
    source = at.source
    dtype = at.h.dtype
    finite = seed.finite
    if site.fossil:
        return seed.module(source).to(dtype)  # type: ignore[no-any-return]

    if source.requires_grad and torch.is_grad_enabled():

        def cut(gradient: Tensor) -> Tensor:
            # The flag already includes this delta; add the gradient that flows back through the seed.
            if track_finite:
                _mark(finite, gradient, arithmetic)
            return _where(finite, gradient)

        source = source.view_as(source)
        source.register_hook(cut)  # type: ignore[no-untyped-call]

    delta = seed.module(source).to(dtype)  # the sink may have less range than the seed's output
    if track_finite:
        _mark(finite, delta.detach())
    return _where(finite, delta)


def _mark(
    finite: Tensor,
    values: Tensor,
    arithmetic: Arithmetic | None = None,
) -> None:
    """Clears the flag ``finite`` if not all ``values`` are, and no scale of the loss excuses it."""
    # The sum of finite values is finite in float32 or wider.
    total = values.sum(dtype=torch.promote_types(values.dtype, torch.float32))
    if total.is_cpu and math.isfinite(total.item()):
        return
    sound = torch.isfinite(total)
    overflowed = None if arithmetic is None else arithmetic.overflow_mask(sound)
    if overflowed is not None:
        sound = sound | overflowed
    finite.logical_and_(sound)


def _where(finite: Tensor, values: Tensor) -> Tensor:
    """Returns ``values``, or zeros if the flag ``finite`` is cleared."""
    if finite.is_cpu and finite.item():
        return values
    # A copy, since the graph saves it: the next pass may change the flag before this one's backward pass.
    return torch.where(finite.clone(), values, 0.0)
