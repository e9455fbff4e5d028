"""Units that are taken out of layers and merged again leave the network as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from esper.core.blueprints.source import widened
from esper.core.place import Place
from esper.hosts.shrink import take_units
from esper.hosts.transformer import CausalAttention
from esper.hosts.widen import merge


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 1),
    )


def flat() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


def attention() -> nn.Sequential:
    return nn.Sequential(CausalAttention(8, 4))


CASES: list[tuple[Callable[[], nn.Sequential], Tensor]] = [
    (mlp, torch.randn(7, 5)),
    (cnn, torch.randn(7, 2, 5, 5)),
    (flat, torch.randn(7, 2, 5, 5)),
    (attention, torch.randn(7, 3, 8)),
]


@pytest.mark.parametrize(("make", "x"), CASES)
def test_taken_units_compute_what_is_missing(
    make: Callable[[], nn.Sequential], x: Tensor
) -> None:
    network = make()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.running_mean)
    network.eval()
    whole = copy.deepcopy(network)
    units = 2
    state = take_units(list(network), units)
    smaller = network(x)
    assert smaller.shape == whole(x).shape
    assert not torch.allclose(smaller, whole(x))
    share = {6: 0.5, 4: 1.0}[{mlp: 6}.get(make, 4)]
    place = Place("r2c0", 3, has_source=True, layers=tuple(network))
    body = widened(place, share)
    body.load_state_dict({**body.state_dict(), **state})
    torch.testing.assert_close(smaller + body.eval()(x), whole(x))
    merge(list(network), body, 1.0)
    torch.testing.assert_close(network(x), whole(x))
    for name, tensor in whole.state_dict().items():
        assert network.state_dict()[name].shape == tensor.shape, name
