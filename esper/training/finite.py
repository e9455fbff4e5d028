"""Values that a network must not lose: those that are finite, as all are until it goes bad."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor, nn

from esper.ops.grad_stats import grad_stats


def finite_buffers(network: nn.Module) -> set[str]:
    """The names of buffers that are finite now, so that only a bad network makes them non-finite (no −inf masks)."""
    names = set()
    for name, buffer in network.named_buffers():
        if buffer.is_floating_point() and buffer.isfinite().all():
            names.add(name)
    return names


def count_not_finite(
    network: nn.Module,
    buffers: Collection[str],
    parameters: Iterable[Tensor],
) -> Tensor:
    """Returns the number of non-finite values in ``parameters`` and in the named buffers of ``network``, float64 []."""
    values = list(parameters)
    values += [buffer for name, buffer in network.named_buffers() if name in buffers]
    stats = grad_stats([[value.detach() for value in values if value.is_floating_point()]])
    return (stats.nan + stats.inf).sum()
