"""Units are taken out of the layers of a network, as the inverse of a widening."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from esper.core.blueprints.source import Shrinkable, inputs_of, width_of
from esper.hosts.widen import INPUTS, OUTPUTS, replace_rows, replace_tensor, rows_of, set_width


@torch.no_grad()
def take_units(layers: Sequence[nn.Module], units: int) -> dict[str, Tensor]:
    """Takes the last ``units`` out of ``layers``; returns the state of the body whose :func:`merge` adds them."""
    first, *others = layers
    if isinstance(first, Shrinkable):
        return first.release(units)
    *middle, last = others
    width = width_of(first)
    kept = width - units
    taken = {}

    def cut(
        number: int,
        layer: nn.Module,
        name: str,
    ) -> None:
        old = getattr(layer, name)
        if old is not None:
            taken[f"{number}.{name}"] = old[kept:].clone()
            replace_tensor(layer, name, old[:kept].clone())

    rows = rows_of(first)
    taken["0.weight"] = rows[kept:].clone()
    replace_rows(first, rows[:kept].clone())
    cut(0, first, "bias")
    set_width(first, OUTPUTS, kept)
    for number, layer in enumerate(middle, 1):
        if isinstance(layer, _NormBase):
            for name in ("weight", "bias", "running_mean", "running_var"):
                cut(number, layer, name)
            if layer.num_batches_tracked is not None:
                taken[f"{number}.num_batches_tracked"] = layer.num_batches_tracked.clone()
            layer.num_features = kept
    columns = rows_of(last)
    read = inputs_of(last) // width * kept
    taken[f"{len(layers) - 1}.weight"] = columns[:, read:].clone()
    replace_rows(last, columns[:, :read].clone())
    set_width(last, INPUTS, read)
    return taken
