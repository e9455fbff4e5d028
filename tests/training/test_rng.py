"""Seeds of random streams, and generators of dropout."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from esper.training.rng import (
    OwnedDropout,
    RngHandle,
    RngStream,
    derive_seed,
    draws_globally,
    own_dropout,
    seeded,
)


def test_streams_of_different_owners_differ_and_each_is_reproducible() -> None:
    owners = list(itertools.product((0, 1, 2**40), range(3), range(3), RngStream))
    seeds = [derive_seed(*owner) for owner in owners]
    assert len(set(seeds)) == len(owners)
    assert seeds == [derive_seed(*owner) for owner in owners]
    counted = {derive_seed(0, 0, 0, RngStream.SEED, counter) for counter in range(10)}
    assert len(counted | set(seeds)) == 10 + len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_a_borrowed_generator_is_put_back_even_after_an_error() -> None:
    before = torch.get_rng_state()
    with seeded(7):
        first = torch.rand(3)
    with contextlib.suppress(ValueError), seeded(7):
        assert torch.equal(torch.rand(3), first)
        raise ValueError("inside")
    assert torch.equal(torch.get_rng_state(), before)


def dropped(
    seed: int, shape: tuple[int, ...], shared_dims: int = 0, p: float = 0.5
) -> torch.Tensor:
    return OwnedDropout(p, RngHandle(torch.Generator().manual_seed(seed)), shared_dims)(
        torch.ones(shape)
    )


def test_own_dropout_draws_from_its_own_generator_and_keeps_the_mean() -> None:
    before = torch.get_rng_state()
    assert torch.equal(dropped(1, (4, 100)), dropped(1, (4, 100)))
    assert not torch.equal(dropped(1, (4, 100)), dropped(2, (4, 100)))
    assert torch.equal(torch.get_rng_state(), before)
    found = dropped(3, (100, 100), p=0.2)
    assert found.unique().tolist() == pytest.approx([0, 1.25])
    assert float(found.mean()) == pytest.approx(1, abs=0.02)
    assert dropped(3, (4, 4), p=1.0).sum() == 0


def test_dropout_layers_are_replaced_but_for_frozen_ones() -> None:
    model: Any = nn.Sequential(
        nn.Dropout(0.3), nn.Sequential(nn.Dropout2d(0.4)), nn.Dropout(0.5).eval()
    )
    own_dropout(model, RngHandle(torch.Generator()))
    assert [type(module) for module in (model[0], model[1][0], model[2])] == [
        OwnedDropout,
        OwnedDropout,
        nn.Dropout,
    ]
    assert [(module.p, module.shared_dims) for module in (model[0], model[1][0])] == [
        (0.3, 0),
        (0.4, 2),
    ]


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.norm(x), 0.5, self.training)


class ReturnsNoMode(Draws):
    """A train() that returns nothing."""

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)


@pytest.mark.parametrize(
    ("make", "draws"),
    [(Draws, True), (ReturnsNoMode, True), (lambda: nn.BatchNorm1d(3), False)],
)
def test_a_network_that_draws_globally_is_found_and_left_as_it_was(
    make: Callable[[], nn.Module], draws: bool
) -> None:
    model = make()
    model.eval()
    before, buffers = (
        torch.get_rng_state(),
        {name: b.clone() for name, b in model.named_buffers()},
    )
    assert (
        draws_globally(model, torch.randn(4, 3, generator=torch.Generator())) is draws
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert all(torch.equal(buffers[name], b) for name, b in model.named_buffers())
