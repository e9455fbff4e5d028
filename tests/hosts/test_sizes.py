"""Hosts of other widths: the nearest one to a number of parameters, and one of a given width."""

from __future__ import annotations

import pytest
from torch import nn

from esper.config import ConfigError
from esper.data.tasks import build_host
from esper.hosts.graft import graft
from esper.hosts.sizes import at_width, nearest_in_size
from esper.hosts.transformer import TransformerHost


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
