"""Networks with a grown submodule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from esper.hosts.grown_module import grown_in_place
from esper.lifecycle.ramps import BlendOperator
from esper.seeds.blend import Seed
from esper.seeds.blueprints import BLUEPRINTS


def seed_of(name: str, topology: str = "mlp", operator: BlendOperator = BlendOperator.ADD, width: int = 8) -> Seed:
    seed = Seed(BLUEPRINTS.get(topology, name).build(width), operator, width, topology)
    for parameter in seed.parameters():
        nn.init.normal_(parameter, std=0.3)
    return seed


def grown(model: nn.Module, path: str, seed: Seed) -> nn.Module:
    grown_in_place(model, {path: (seed, 0.7)})
    return model


def require_same(network: nn.Module, other: nn.Module, x: Any) -> None:
    torch.testing.assert_close(other.eval()(x), network.eval()(x), rtol=1e-5, atol=1e-5)
