"""The process's random generators, seeded for a block."""

from __future__ import annotations

import random
from contextlib import suppress

import numpy as np
import torch

from esper.data.rng import drawing_from, epoch_seed


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(1)), random.random(), float(np.random.random())  # noqa: NPY002


def test_a_block_draws_by_its_seed_from_every_generator() -> None:
    found = []
    for seed in (5, 5, 6):
        with drawing_from(seed):
            found.append(drawn())
    assert found[0] == found[1]
    assert all(one != other for one, other in zip(found[0], found[2], strict=True))


def test_every_generator_is_restored_after_a_block_that_fails() -> None:
    with drawing_from(1):
        wanted = drawn(), drawn()
    with drawing_from(1):
        first = drawn()
        with suppress(ValueError), drawing_from(2):
            drawn()
            raise ValueError("inside")
        assert (first, drawn()) == wanted


def test_the_seed_of_an_epoch_depends_on_the_order_of_its_rows() -> None:
    rows = torch.arange(10)
    assert epoch_seed(rows) == epoch_seed(torch.arange(20)[::2] // 2)
    assert epoch_seed(rows) != epoch_seed(rows.flip(0))
    assert all(0 <= epoch_seed(torch.arange(n)) < 2**63 for n in range(50))
