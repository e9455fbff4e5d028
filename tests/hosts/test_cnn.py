"""The convolutional host: sizes, slots, and the grown host as a plain module."""

import itertools

import pytest
import torch

from esper.core.blend import Seed
from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import STYLES
from esper.data.digits import build_host
from esper.hosts.cnn import CNNHost
from esper.hosts.grown import GrownHost, KeptSeed


@pytest.mark.parametrize(
    ("host", "parameters"),
    [
        (CNNHost(3, 10, base=8, blocks=3), 6_418),
        (build_host(), 277),
    ],
    ids=["cifar10", "digits"],
)
def test_hosts_have_the_parameters_of_their_presets(
    host: CNNHost, parameters: int
) -> None:
    assert host.parameter_count == parameters
    assert sum(p.numel() for p in host.parameters()) == parameters


def test_slots_sit_before_and_after_each_pool() -> None:
    host = CNNHost(1, 10, base=3, blocks=2)
    assert [site.name for site in host.sites] == ["r0c0", "r1c0", "r0c1", "r1c1"]
    assert host.slot_names == ("r0c0", "r0c1", "r1c0", "r1c1")
    shapes = {}
    h = torch.randn(2, 1, 8, 8)
    for segment, site in zip(host.segments, host.sites, strict=False):
        h = segment(h)
        assert h.shape[1] == site.channels
        shapes[site.name] = tuple(h.shape[1:])
    assert shapes == {
        "r0c0": (3, 8, 8),
        "r1c0": (3, 4, 4),
        "r0c1": (6, 4, 4),
        "r1c1": (6, 2, 2),
    }
    assert host.segments[-1](h).shape == (2, 10)


def test_a_last_block_that_does_not_pool_has_one_slot() -> None:
    """The global average sees the output of a seed there at 4×4."""
    host = build_host()
    assert [site.name for site in host.sites] == ["r0c0", "r1c0", "r0c1"]
    assert host.slot_names == ("r0c0", "r0c1", "r1c0")
    h = torch.randn(2, 1, 8, 8)
    for segment in host.segments[:-1]:
        h = segment(h)
    assert h.shape == (2, 6, 4, 4)
    torch.testing.assert_close(
        host.segments[-1](h), host.segments[-1][-1](h.mean(dim=(2, 3)))
    )  # type: ignore[index]


@pytest.mark.parametrize(("rows", "pool"), [(0, True), (3, True), (2, False)])
def test_impossible_rows_are_refused(rows: int, pool: bool) -> None:
    with pytest.raises(ValueError, match=f"rows={rows}"):
        CNNHost(1, 2, base=1, blocks=1, pool=pool, rows=rows)


@pytest.mark.parametrize("style", STYLES)
def test_a_grown_host_adds_alpha_times_the_delta_in_each_slot(style: str) -> None:
    torch.manual_seed(0)
    host = build_host().eval()
    x = torch.randn(5, 1, 8, 8)
    sites = {site.name: site for site in host.sites}
    alphas = {"r0c0": 0.5, "r0c1": 1.0}
    seeds = {
        name: Seed(
            BLUEPRINTS.get("cnn", "conv_light").build(sites[name].channels),
            STYLES[style].operator,
            sites[name].channels,
            "cnn",
        )
        for name in alphas
    }
    h = x
    for segment, site in itertools.zip_longest(host.segments, host.sites):
        h = segment(h)
        if site is not None and site.name in seeds:
            h = h + alphas[site.name] * seeds[site.name](h)
    kept = {
        name: KeptSeed("conv_light", style, alpha) for name, alpha in alphas.items()
    }
    grown = GrownHost(host, seeds, kept, "test")
    torch.testing.assert_close(grown(x), h, rtol=1e-6, atol=1e-6)
    assert not torch.equal(grown(x), host(x))
    assert torch.equal(GrownHost(host, {}, {}, "test")(x), host(x))


def test_each_block_may_have_a_width_of_its_own() -> None:
    host = CNNHost(1, 10, base=3, blocks=2, widths=[4, 9])
    assert {site.name: site.channels for site in host.sites} == {
        "r0c0": 4,
        "r0c1": 9,
        "r1c0": 4,
        "r1c1": 9,
    }
    with pytest.raises(
        ValueError, match=r"widths are \[4\]; expected one for each of 2 blocks"
    ):
        CNNHost(1, 10, base=3, blocks=2, widths=[4])
