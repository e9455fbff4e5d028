"""Lanes and the ownership of random numbers."""

import contextlib
import itertools
import threading
from dataclasses import dataclass

import pytest
import torch

from esper.training.lanes import LaneError, Lanes
from esper.training.randomness import Purpose, derive_seed, seeded


@dataclass
class Place:
    index: int
    epoch: int = 3
    batch: int = 5
    done: bool = False


def test_every_env_is_worked_on_once_with_one_thread() -> None:
    envs = [Place(index) for index in range(7)]
    threads: list[int] = []
    torch.set_num_threads(2)  # of the thread that owns the envs; the fixture puts it back

    def work(env: Place) -> None:
        threads.append(torch.get_num_threads())
        assert threading.current_thread() is not threading.main_thread()
        env.done = True

    with Lanes(3) as lanes:
        lanes.run(work, envs)
    assert all(env.done for env in envs)
    assert threads == [1] * 7


def test_finding_m12_an_error_names_env_epoch_and_batch_and_the_others_finish() -> None:
    envs = [Place(index) for index in range(4)]

    def work(env: Place) -> None:
        if env.index in (1, 3):
            raise ZeroDivisionError("by zero")
        env.done = True

    with Lanes(2) as lanes, pytest.raises(LaneError, match="env 1, epoch 3, batch 5: ZeroDivisionError: by zero") as e:
        lanes.run(work, envs)
    assert isinstance(e.value.__cause__, ZeroDivisionError)
    assert [env.done for env in envs] == [True, False, True, False]


def test_streams_of_different_owners_differ_and_each_is_reproducible() -> None:
    owners = list(itertools.product((0, 1, 2**40), range(3), range(3), Purpose))
    seeds = [derive_seed(*owner) for owner in owners]
    assert len(set(seeds)) == len(owners)
    assert seeds == [derive_seed(*owner) for owner in owners]
    counted = {derive_seed(0, 0, 0, Purpose.SEED, counter) for counter in range(10)}
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
