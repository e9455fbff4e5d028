"""A grown network as a host."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from esper.files.grown_host import assemble
from esper.hosts.cnn import CNNHost
from esper.hosts.grown import GrownHost, KeptSeed, StaticHost
from esper.seeds.blueprints import BLUEPRINTS

KEPT = {"r0c0": KeptSeed("conv_light", "LINEAR_ADD", 1.0), "r0c1": KeptSeed("norm", "GATED_GATE", 0.5)}


def grown(base: int = 3) -> GrownHost:
    torch.manual_seed(1)
    host = CNNHost(1, 10, base=base, blocks=2, rows=2)
    found = {slot: BLUEPRINTS.get("cnn", seed.blueprint) for slot, seed in KEPT.items()}
    network = assemble(host, KEPT, found, "digits").eval()
    for parameter in network.seeds.parameters():
        nn.init.normal_(parameter, std=0.3)
    return network


@pytest.mark.parametrize("base", [3, 8], ids=["plain", "fused"])
def test_a_static_host_computes_the_grown_network(base: int) -> None:
    """Built-in seeds run even if their sites are declared vacant."""
    network, x = grown(base), torch.randn(4, 1, 8, 8)
    host = StaticHost(network).eval()
    assert host.parameter_count == sum(parameter.numel() for parameter in network.parameters())
    assert host.slot_names == network.host.slot_names
    with torch.no_grad():
        wanted = network(x)
        assert torch.equal(host(x), wanted)
        assert torch.equal(host.forward_with_hook(x, lambda _site, h: h, vacant=range(4)), wanted)
        assert not torch.equal(network.host(x), wanted)


def test_a_static_host_continues_after_its_built_in_seeds() -> None:
    network, x = grown(), torch.randn(4, 1, 8, 8)
    host = StaticHost(network).eval()
    features: dict[int, torch.Tensor] = {}

    def keep(site: int, h: torch.Tensor) -> torch.Tensor:
        features[site] = h
        return h

    with torch.no_grad():
        wanted = host.forward_with_hook(x, keep)
        for site, h in features.items():
            assert torch.equal(host.forward_from(x, site, h, lambda _site, h: h), wanted)
