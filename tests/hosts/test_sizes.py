"""Hosts of other widths: the nearest one to a number of parameters, and one of a given width."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from esper.config import ConfigError
from esper.data.tasks import build_host
from esper.hosts.graft import GraftedHost, graft
from esper.hosts.sizes import HostFamily, at_width, nearest_in_size

DIGITS = torch.zeros(3, 1, 8, 8)


@pytest.mark.parametrize(
    ("wanted", "width", "parameters"),
    [(1, 3, 277), (277, 3, 277), (357, 3, 277), (358, 4, 438), (900, 6, 868)],
)
def test_the_nearest_width_of_a_convolutional_host(
    wanted: int, width: int, parameters: int
) -> None:
    found = nearest_in_size(lambda: build_host("digits"), wanted, DIGITS)
    assert found.width == width
    made = found()
    assert made.parameter_count == parameters
    assert made.slot_names == build_host("digits").slot_names


def own(width: int) -> GraftedHost:
    """10 · w parameters of the convolution, 10 · w + 10 of the lazy head."""
    model = nn.Sequential(
        nn.Conv2d(1, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(10)
    )
    return graft(model, {"r0c0": "0"})


@pytest.mark.parametrize(
    ("wanted", "step", "width"),
    [(1, 1, 4), (100, 1, 4), (101, 1, 5), (170, 2, 8), (1000, 1, 49)],
)
def test_a_users_network_is_widened_by_its_family(
    wanted: int, step: int, width: int
) -> None:
    found = nearest_in_size(HostFamily(own, 4, step), wanted, DIGITS)
    assert found.width == width
    made = found()
    made.probe(DIGITS)
    assert made.parameter_count == 20 * width + 10


def test_a_family_makes_its_host_and_those_of_other_widths() -> None:
    family = HostFamily(own, 4, 2)
    family().probe(DIGITS)
    made = at_width(family, 2)()
    made.probe(DIGITS)
    assert made.parameter_count == 50
    with pytest.raises(
        ConfigError, match="cannot have width 3: give a multiple of 2; it has 4"
    ):
        at_width(family, 3)


@pytest.mark.parametrize(("width", "step"), [(0, 1), (4, 0), (3, 2)])
def test_a_family_whose_widths_do_not_fit_is_refused(width: int, step: int) -> None:
    with pytest.raises(ConfigError, match="HostFamily: width is"):
        HostFamily(own, width, step)


def test_a_network_without_a_family_cannot_be_widened() -> None:
    with pytest.raises(
        ConfigError,
        match=r"cannot widen a GraftedHost: .* build_host=esper\.HostFamily\(build, width",
    ):
        nearest_in_size(lambda: own(4), 1000, DIGITS)
