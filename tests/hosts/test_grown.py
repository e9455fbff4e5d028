"""A grown network as a host."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from esper.core.blueprints import BLUEPRINTS
from esper.core.place import Features
from esper.files.grown_host import assemble
from esper.hosts.cnn import CNNHost
from esper.hosts.grown import GrownHost, KeptSeed

KEPT = {
    "r0c0": KeptSeed("conv_light", "LINEAR_ADD", 1.0),
    "r0c1": KeptSeed("norm", "GATED_GATE", 0.5),
}


def grown(base: int = 3) -> GrownHost:
    torch.manual_seed(1)
    host = CNNHost(1, 10, base=base, blocks=2, rows=2)
    found = {slot: BLUEPRINTS.get("cnn", seed.blueprint) for slot, seed in KEPT.items()}
    network = assemble(host, KEPT, found, "digits").eval()
    for parameter in network.seeds.parameters():
        nn.init.normal_(parameter, std=0.3)
    return network


@pytest.mark.parametrize("base", [3, 8], ids=["plain", "fused"])
def test_a_grown_host_adds_its_seeds(base: int) -> None:
    """Built-in seeds run even if their sites are declared vacant."""
    host, x = grown(base), torch.randn(4, 1, 8, 8)
    assert host.parameter_count == host.host.parameter_count + sum(
        p.numel() for p in host.seeds.parameters()
    )
    assert host.slot_names == host.host.slot_names
    names = [site.name for site in host.sites]

    def add(site: int, here: Features) -> torch.Tensor:
        h = here.h
        name = names[site]
        return h + KEPT[name].alpha * host.seeds[name](h) if name in KEPT else h

    with torch.no_grad():
        wanted = host(x)
        torch.testing.assert_close(host.host.forward_with_hook(x, add), wanted)
        assert torch.equal(
            host.forward_with_hook(x, lambda _site, at: at.h, vacant=range(4)), wanted
        )
        assert not torch.equal(host.host(x), wanted)


def test_a_grown_host_continues_after_its_seeds() -> None:
    host, x = grown(), torch.randn(4, 1, 8, 8)
    features: dict[int, torch.Tensor] = {}

    def keep(site: int, here: Features) -> torch.Tensor:
        h = here.h
        features[site] = h
        return h

    with torch.no_grad():
        wanted = host.forward_with_hook(x, keep)
        for site, h in features.items():
            assert torch.equal(
                host.forward_from(x, site, Features.at_sink(h), lambda _site, at: at.h),
                wanted,
            )
