"""A grown network as a host, and hosts of other widths."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from esper.config import ConfigError
from esper.data.tasks import build_host
from esper.files.grown_host import assemble
from esper.hosts.cnn import CNNHost
from esper.hosts.graft import graft
from esper.hosts.grown import GrownHost, KeptSeed
from esper.hosts.sizes import at_width, nearest_in_size
from esper.hosts.static import StaticHost
from esper.hosts.transformer import TransformerHost
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
def test_a_static_host_computes_what_was_grown(base: int) -> None:
    """Also where sites are said to be vacant: what is built in there is done all the same."""
    network, x = grown(base), torch.randn(4, 1, 8, 8)
    host = StaticHost(network).eval()
    assert host.parameter_count == sum(parameter.numel() for parameter in network.parameters())
    assert host.slot_names == network.host.slot_names
    with torch.no_grad():
        wanted = network(x)
        assert torch.equal(host(x), wanted)
        assert torch.equal(host.walk(x, lambda _site, h: h, vacant=range(4)), wanted)
        assert not torch.equal(network.host(x), wanted)


def test_a_static_host_resumes_behind_what_is_built_in() -> None:
    network, x = grown(), torch.randn(4, 1, 8, 8)
    host = StaticHost(network).eval()
    features: dict[int, torch.Tensor] = {}

    def keep(site: int, h: torch.Tensor) -> torch.Tensor:
        features[site] = h
        return h

    with torch.no_grad():
        wanted = host.walk(x, keep)
        for site, h in features.items():
            assert torch.equal(host.forward_from(x, site, h, lambda _site, h: h), wanted)


@pytest.mark.parametrize(
    ("wanted", "width", "parameters"), [(1, 3, 277), (277, 3, 277), (357, 3, 277), (358, 4, 438), (900, 6, 868)]
)
def test_the_nearest_width_of_a_convolutional_host(wanted: int, width: int, parameters: int) -> None:
    found = nearest_in_size(build_host("digits"), wanted)
    assert (found.width, found.parameters) == (width, parameters)
    made = found.build()
    assert made.parameter_count == parameters
    assert made.slot_names == build_host("digits").slot_names


def test_the_nearest_width_of_a_transformer() -> None:
    host = TransformerHost(vocabulary=50, width=8, layers=2, heads=4, block=16, slots=2)
    sizes = {w: TransformerHost(50, w, 2, 4, 16, 2).parameter_count for w in (8, 12, 16)}
    assert nearest_in_size(host, sizes[12] + 1).width == 12
    assert nearest_in_size(host, sizes[16] - 1).parameters == sizes[16]
    assert isinstance(nearest_in_size(host, sizes[16]).build(), TransformerHost)


@pytest.mark.parametrize(("width", "parameters"), [(1, 63), (3, 277), (4, 438)])
def test_a_convolutional_host_of_a_width_narrower_or_wider(width: int, parameters: int) -> None:
    """9·w + 9·2·w² of convolutions, 2·3·w of norms, 10·2·w + 10 of the head."""
    made = at_width(build_host("digits"), width)()
    assert made.parameter_count == parameters == 18 * width**2 + 35 * width + 10
    assert made.slot_names == build_host("digits").slot_names


def test_a_transformer_of_a_width_that_its_heads_divide() -> None:
    host = TransformerHost(vocabulary=50, width=8, layers=2, heads=4, block=16, slots=2)
    made = at_width(host, 4)()
    assert made.parameter_count == TransformerHost(50, 4, 2, 4, 16, 2).parameter_count
    for width in (6, 0, -4):
        with pytest.raises(ConfigError, match="give a multiple of its 4 heads; the task's has 8"):
            at_width(host, width)


def test_how_to_widen_another_network_is_not_known() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 10))
    with pytest.raises(ConfigError, match="cannot widen a GraftedHost"):
        nearest_in_size(graft(model, {"r0c0": "0"}), 1000)
