"""Copies of hosts in pinned memory: asynchronous, in the order of the stream, and the same bits."""

from __future__ import annotations

import pytest
import torch

from esper.config import Durations, TrainingConfig
from esper.env.make import make_env
from esper.env.training_backend import copies_held
from esper.env.vector_env import GrowthVectorEnv
from esper.training.governor import Governor
from esper.training.snapshot import TensorCopies, ValidationRecord
from esper.training.step import train_epoch
from tests.core_helpers import same_bits, tensors_of, unmeasured_fossils, wait_actions
from tests.training.kernels_used import channels_last_training

pytestmark = pytest.mark.cuda

PLACEMENTS = (0, 1, 2)
RECORD = ValidationRecord(loss=1.0, committed=50.0, all_off=40.0, all_off_loss=1.5)


def busy() -> None:
    """The current stream works for a while."""
    torch.cuda._sleep(200_000_000)


def test_a_pinned_copy_is_taken_and_put_back_in_stream_order_without_a_wait() -> None:
    images = torch.randn(4, 8, 16, 16, device="cuda").to(
        memory_format=torch.channels_last
    )
    count = torch.arange(5, device="cuda")
    live, expected = [("images", images), ("count", count)], images.cpu()
    copies = TensorCopies(pinned=True)

    def work() -> None:
        images.add_(1.0)
        busy()
        copies.save(live)
        images.zero_()
        count.zero_()
        copies.restore(live)
        images.mul_(2.0)

    work()  # allocates the memory; and loading a kernel for the first time waits for the GPU
    images.copy_(expected)
    count.copy_(torch.arange(5))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
        running = not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert running
    assert (copies.place, copies.bytes) == ("pinned", images.nbytes + count.nbytes)
    assert copies.tensors["images"].stride() == images.stride()
    assert torch.equal(images.cpu(), 2.0 * (expected + 1.0))
    assert count.tolist() == [0, 1, 2, 3, 4]


def test_what_is_saved_of_a_pinned_copy_waits_until_it_is_there() -> None:
    numbers = torch.zeros(1_000_000, device="cuda")
    copies = TensorCopies(pinned=True)
    copies.save([("numbers", numbers)])
    torch.cuda.synchronize()
    busy()
    numbers.fill_(7.0)
    copies.save([("numbers", numbers)])
    assert bool((copies.state_dict()["numbers"] == 7.0).all())


@pytest.mark.parametrize("pinned", PLACEMENTS)
def test_rollbacks_are_exact_wherever_snapshots_lie(pinned: int) -> None:
    """The newest snapshot is restored, then the older one, then one taken afterwards; saved copies give the same."""
    training = channels_last_training("cuda")
    config = TrainingConfig.parse(
        {"governor": {"snapshot_every": 1, "max_rollbacks": 100}}
    )
    governor = Governor(config.governor, Durations.of(config, 60), 10, pinned)
    states = []

    def take() -> None:
        busy()
        assert governor.snapshot_if_due(
            training, RECORD, unmeasured_fossils(training), fossilized=False
        )
        states.append(tensors_of(training))
        train_epoch(training)

    for _ in range(4):
        take()
    saved = governor.state_dict()
    places = [
        "pinned" if pinned > others else "cuda:0" for others in (1, 0)
    ]  # the older one first
    assert [snapshot.copies.place for snapshot in governor._generations] == places
    for expected in (states[3], states[2]):
        governor.roll_back(training)
        same_bits(tensors_of(training), expected)
    training.epoch += 1
    take()
    governor.roll_back(training)
    same_bits(tensors_of(training), states[4])
    loaded = Governor(config.governor, Durations.of(config, 60), 10, pinned)
    loaded.load_state_dict(saved, training.device)
    for expected in (states[3], states[2]):
        loaded.roll_back(training)
        same_bits(tensors_of(training), expected)


def test_an_env_keeps_to_the_limit() -> None:
    """None of its copies is on the GPU; a host that breaks is rolled back from pinned memory."""
    config = TrainingConfig.parse(
        {
            "run": {"device": "cuda", "max_device_copies_mib": 1e-3},
            "task": {"samples_per_epoch": 128},
            "env": {"n_envs": 2, "episode_length": 6, "baseline_episodes": 1},
            "governor": {"snapshot_every": 1},
        }
    )
    training = make_env(config)
    assert isinstance(training, GrowthVectorEnv)
    try:
        training.reset(seed=0)
        assert training.execution.pinned == 2
        for _ in range(2):
            training.step(wait_actions(2))
        good = tensors_of(training.training[0])
        with torch.no_grad():
            next(training.training[0].host.parameters()).fill_(float("nan"))
        training.step(wait_actions(2))
        assert [host.governor.rollbacks for host in training.backend.hosts] == [1, 0]
        same_bits(tensors_of(training.training[0]), good)
        assert all(
            set(held) == {"pinned"} for held in training.backend.map_hosts(copies_held)
        )
    finally:
        training.close()
