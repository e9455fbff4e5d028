"""Buffers that an incubating seed has of its own."""

from __future__ import annotations

import torch
from torch import nn

from esper.core.blend import Seed
from esper.core.ramps import BlendOperator
from esper.training.shadow import ShadowBuffers, copied_buffers


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3))
    )


def state(module: nn.Module) -> list[list[float]]:
    return [buffer.flatten().tolist() for buffer in module.buffers()]


X = torch.randn(8, 3, generator=torch.Generator().manual_seed(1)) + 5


def test_passes_within_a_block_update_the_copies_and_never_the_network() -> None:
    plain, host = network(), network()
    shadow, before, own = (
        ShadowBuffers(host),
        state(host),
        [id(buffer) for buffer in host.buffers()],
    )
    for _ in range(2):
        with shadow.in_place():
            host(X)
        plain(X)
    assert state(host) == before
    assert [id(buffer) for buffer in host.buffers()] == own
    assert [buffer.flatten().tolist() for buffer in shadow.tensors()] == state(plain)


def test_a_refill_copies_the_current_buffers_in_place() -> None:
    host = network()
    shadow = ShadowBuffers(host)
    places = [buffer.data_ptr() for buffer in shadow.tensors()]
    host(X)
    shadow.refill()
    assert [buffer.flatten().tolist() for buffer in shadow.tensors()] == state(host)
    assert [buffer.data_ptr() for buffer in shadow.tensors()] == places


def test_a_buffer_that_a_layer_replaces_is_kept_among_the_copies() -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return x

    host = Replaces()
    shadow = ShadowBuffers(host)
    for _ in range(3):
        with shadow.in_place():
            host(X)
    assert host.count.tolist() == [0]
    assert shadow.tensors()[0].tolist() == [3]


def test_buffers_of_seeds_are_lent_for_a_block() -> None:
    seed = Seed(nn.BatchNorm1d(3), BlendOperator.ADD, 3, "mlp")
    before = state(seed)
    with copied_buffers([seed, Seed(nn.Linear(3, 3), BlendOperator.ADD, 3, "mlp")]):
        seed(X)
        assert state(seed) != before
    assert state(seed) == before
    seed(X)
    assert state(seed) != before
