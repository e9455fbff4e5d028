"""The convolutional host: sizes, slots, and the grown host as a plain module."""

import pytest
import torch

from esper.data.digits import build_host
from esper.hosts.cnn import CNNHost


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
