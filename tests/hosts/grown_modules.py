"""Networks with a grown submodule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from esper.core.blend import Seed
from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import BlendOperator
from esper.hosts.seed_hook import attach


def seed_of(
    name: str,
    topology: str = "mlp",
    operator: BlendOperator = BlendOperator.ADD,
    width: int = 8,
) -> Seed:
    seed = Seed(BLUEPRINTS.get(topology, name).build(width), operator, width, topology)
    for parameter in seed.parameters():
        nn.init.normal_(parameter, std=0.3)
    return seed


def grown(model: nn.Module, path: str, seed: Seed) -> nn.Module:
    attach(model, {path: ("r0c0", seed, 0.7)})
    return model


def require_same(network: nn.Module, other: nn.Module, x: Any) -> None:
    torch.testing.assert_close(other.eval()(x), network.eval()(x), rtol=1e-5, atol=1e-5)


def without_esper(network: nn.Module) -> bool:
    hooks = [
        hook for module in network.modules() for hook in module._forward_hooks.values()
    ]
    return not any(
        type(each).__module__.startswith("esper")
        for each in (*network.modules(), *hooks)
    )


def linear(layer: nn.Linear) -> nn.Module:
    """The layer itself."""
    return layer


def conv1d(layer: nn.Linear) -> nn.Module:
    """GPT-2's transposed layer with the weights of ``layer``; skips the test without transformers."""
    utils = pytest.importorskip("transformers.pytorch_utils")
    transposed: nn.Module = utils.Conv1D(layer.out_features, layer.in_features)
    transposed.load_state_dict({"weight": layer.weight.T, "bias": layer.bias})
    return transposed


Kind = Callable[[nn.Linear], nn.Module]
KINDS: list[Kind] = [linear, conv1d]
"""Makers of each kind of linear layer from an ordinary one; they compute the same."""
