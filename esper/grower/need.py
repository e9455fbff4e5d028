"""Need of the vacant slots of a model in a user's loop, by the losses of two batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.core.blueprints.source import reader_of
from esper.grower.sites import SiteHooks, aside
from esper.training.need import Seen, inexpressible, measured_layer, watched

Loss = Callable[[], Tensor]


def measure_need(hooks: SiteHooks, first: Loss, second: Loss) -> dict[str, float]:
    """Returns the need of each vacant slot, in units of the loss, see ``esper.training.need``.

    ``first`` and ``second`` compute the mean losses of two batches that share no sample. No gradient is stored, and
    buffers and random numbers are afterwards as they were. Slots without a layer that need is defined for are left out.

    Raises ConfigError for a loss that does not depend on the model.
    """
    layers = {}
    for name, site in hooks.sites.items():
        layer = reader_of(site.place)
        if site.seed is None and layer is not None and measured_layer(layer):
            layers[name] = layer
    if not layers:
        return {}
    seen = [_look(hooks, layers, loss) for loss in (first, second)]
    loss = (seen[0].loss + seen[1].loss) / 2
    needs = {}
    for place, (name, layer) in enumerate(layers.items()):
        share = inexpressible(
            seen[0].at(place, layer),
            seen[1].at(place, layer),
        )
        needs[name] = float(loss * share)
    return needs


def _look(
    hooks: SiteHooks,
    layers: Mapping[str, nn.Module],
    loss: Loss,
) -> Seen:
    """Runs a batch and sees what its loss wants of ``layers``."""
    with watched(layers.values()) as (inputs, outputs), aside(hooks):
        measured = loss()
    missing = [name for name, layer in layers.items() if layer not in outputs]
    if missing or not measured.requires_grad:
        raise ConfigError(
            "measure_need() takes two functions that compute the loss of a batch with the model and gradients; the "
            f"layers at slot {', '.join(missing) or 'any'} took no part in one of them"
        )
    gradients = torch.autograd.grad(
        measured,
        [outputs[layer] for layer in layers.values()],
        materialize_grads=True,
    )
    return Seen(
        [inputs[layer] for layer in layers.values()],
        list(gradients),
        measured.detach(),
    )
