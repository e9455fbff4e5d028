"""Real layers that are wider at once, with the function of the narrow ones.

Chen, Goodfellow and Shlens 2016, "Net2Net: Accelerating Learning via Knowledge Transfer", section 3.2 (Net2WiderNet).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.hosts.host import Host, layers_of
from esper.ops.norm_relu_pool import NormReluPool

NOISE = 0.01
"""Std of the noise on the incoming weights of copied units, in units of the std of the layer's weights, so that a copy
and its original learn different things."""

Layer = nn.Conv2d | nn.Linear


@torch.no_grad()
def widen_as_copies(narrow: Host, wide: Host) -> None:
    """Overwrites the weights of ``wide`` so that it computes what ``narrow`` does, up to the noise.

    Each new unit is a copy of one that is drawn from torch's global generator, and the units that read from both share
    its outgoing weights. Hosts are chains of convolutions or linear layers with BatchNorms between them. Raises
    ConfigError for others.
    """
    small = _chain(narrow)
    large = _chain(wide)
    if list(map(type, small)) != list(map(type, large)):
        raise ConfigError("net2net widens a chain of layers, and these two hosts have different ones")
    last = max(number for number, layer in enumerate(small) if isinstance(layer, Layer))
    inputs = torch.arange(_inputs_of(small[0]))
    for number, (old, new) in enumerate(zip(small, large, strict=True)):
        if not isinstance(old, Layer):
            _copy_units(old, new, inputs)
            continue
        assert isinstance(new, Layer)
        width = len(old.weight)
        outputs = torch.arange(width)
        if number < last:
            added = torch.randint(width, (len(new.weight) - width,))
            outputs = torch.cat([outputs, added])
        shared = torch.bincount(inputs, minlength=_inputs_of(old))[inputs]  # [inputs]: units that copy the same one
        kernel = [1] * (old.weight.dim() - 2)
        weight = old.weight[outputs][:, inputs] / shared.view(1, -1, *kernel).to(old.weight)
        weight[width:] += NOISE * weight.std() * torch.randn_like(weight[width:])
        new.weight.copy_(weight)
        if old.bias is not None and new.bias is not None:
            new.bias.copy_(old.bias[outputs])
        inputs = outputs


def _chain(host: Host) -> list[nn.Module]:
    """Returns the layers with parameters, in execution order. Raises ConfigError if they are of other kinds."""
    layers = list(layers_of(host).values())
    known = (nn.Conv2d, nn.Linear, nn.BatchNorm2d, NormReluPool)
    weighted = [layer for layer in layers if isinstance(layer, Layer)]
    problem = ""
    for before, after in pairwise(weighted):
        if _inputs_of(after) != len(before.weight):
            problem = "layers that do not read one another"
    if not weighted:
        problem = "layers that do not read one another"
    for layer in layers:
        if not isinstance(layer, known):
            problem = f"a {type(layer).__name__}"
            break
    if problem:
        raise ConfigError(
            f"net2net widens chains of convolutions, linear layers and BatchNorms; this host has {problem}"
        )
    return layers


def _inputs_of(layer: nn.Module) -> int:
    assert isinstance(layer, Layer)
    return int(layer.weight.shape[1])


def _copy_units(old: nn.Module, new: nn.Module, units: Tensor) -> None:
    """Gives the norm ``new`` the parameters and statistics of ``old``, by unit."""
    values = dict(old.state_dict())
    for name, tensor in new.state_dict().items():
        value = values[name]
        if value.dim():
            value = value[units]
        tensor.copy_(value)
