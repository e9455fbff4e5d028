"""Seeds of random streams, and generators of dropout."""

import contextlib
import itertools

import torch

from esper.training.rng import RngStream, derive_seed, seeded


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
