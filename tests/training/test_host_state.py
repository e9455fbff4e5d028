"""The state of a host in training: copies, their places on a GPU and in pinned memory, restoring and resuming.

Pinned memory needs a GPU: here the placements are forced on a CPU, where both places are ordinary memory, and what
moves where is the same. tests/cuda/test_pinned_copies.py has the real thing.
"""

from __future__ import annotations

import gc
import random
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from esper.config import ConfigError, RunConfig, TrainingConfig
from esper.core.blueprints import BLUEPRINTS
from esper.core.stage import SeedStage
from esper.env.training_backend import copies_held
from esper.training.governor import Governor
from esper.training.host_state import (
    MIB,
    all_tensors,
    copies_to_pin,
    generators_of,
    host_state,
    load_host_state,
    pinned_copies,
    restore_host_state,
)
from esper.training.host_training import HostTraining
from esper.training.snapshot import ValidationRecord
from tests.core_helpers import (
    DAMAGE,
    make_training,
    plant,
    rig,
    same_bits,
    tensors_of,
    tiny_config,
    train,
    unmeasured_fossils,
)
from tests.training.live_tensors import STATM, resident_mib


def test_the_start_of_an_epoch_comes_back() -> None:
    training = make_training()
    plant(training, "r0c0", stage=SeedStage.HOLDING)
    train(training)
    start = host_state(training)
    before = tensors_of(training, ("r0c0",))
    train(training)
    after = tensors_of(training, ("r0c0",))
    restore_host_state(training, start)
    same_bits(tensors_of(training, ("r0c0",)), before)
    train(training)
    same_bits(tensors_of(training, ("r0c0",)), after)


def grown() -> HostTraining:
    training = make_training()
    plant(training, "r0c0", stage=SeedStage.HOLDING)
    plant(training, "r0c1", "norm", "GATED_GATE")
    train(training, 2)
    return training


def test_another_host_resumes_to_the_same_bits() -> None:
    training, other, slots = grown(), make_training(seed=9), ("r0c0", "r0c1")
    load_host_state(other, host_state(training), BLUEPRINTS)
    for site, wanted in (
        (other.site_by_name[name], training.site_by_name[name]) for name in slots
    ):
        site.assign(wanted.role, wanted.alpha, wanted.target)
    assert (other.epoch, other.germinations, other.run_seed) == (2, 2, 0)
    for _ in range(2):
        same_bits(tensors_of(other, slots), tensors_of(training, slots))
        train(other)
        train(training)


def test_a_state_without_a_tensor_of_the_host_is_refused() -> None:
    state = host_state(grown())
    state["tensors"] = {
        name: value
        for name, value in state["tensors"].items()
        if name != "r0c1 is finite"
    }
    with pytest.raises(ValueError, match=r"its tensors are .*'r0c1 is finite'"):
        load_host_state(make_training(), state, BLUEPRINTS)


def test_saved_tensors_share_no_memory_with_the_host() -> None:
    training = grown()
    state = host_state(training)
    live = {tensor.data_ptr() for _, tensor in all_tensors(training)}
    assert not live & {tensor.data_ptr() for tensor in state["tensors"].values()}
    assert {"r0c0 is finite", "r0c1.shadow.0"} <= state["tensors"].keys()


def test_a_snapshot_keeps_the_seeds_that_are_named_and_drops_gradients() -> None:
    training = grown()
    assert {
        name.partition(".")[0] for name, _ in training.network_tensors(("r0c0",))
    } == {"host", "r0c0"}
    training.discard(kept=("r0c0",), saved=())
    assert set(training.seed_groups) == {"r0c0"}
    assert training.site_by_name["r0c1"].seed is None
    assert all(p.grad is None for p in training.host.parameters())


def test_generators_of_removed_seeds_are_not_saved() -> None:
    training = grown()
    assert set(generators_of(training)) == {
        "order",
        "dropout",
        "r0c0.shadow",
        "r0c1.shadow",
    }
    training.remove(training.site_by_name["r0c1"])
    assert set(generators_of(training)) == {"order", "dropout", "r0c0.shadow"}


PLACEMENTS = (0, 1, 2)


@pytest.mark.parametrize(
    ("limit", "pinned"),
    [
        (1e9, 0),
        (16.0, 0),  # two copies of 4 hosts of 2 MiB
        (15.9, 1),
        (8.0, 1),
        (7.9, 2),
        (1e-9, 2),
    ],
)
def test_the_first_copies_go_until_the_others_fit(limit: float, pinned: int) -> None:
    assert pinned_copies(2 * MIB, 4, limit) == pinned
    assert pinned_copies(0, 4, limit) == 0


def on_gpus(*devices: str) -> list[HostTraining]:
    """Hosts that say they are there, 8 KiB a copy: 1,024 float32 values with their momentum."""
    weight = torch.nn.Linear(32, 32, bias=False)
    optimizer = SimpleNamespace(
        state={weight.weight: {"momentum_buffer": torch.zeros(32, 32)}}
    )
    group = SimpleNamespace(
        name="host", parameters=[weight.weight], optimizer=optimizer
    )
    made = [
        SimpleNamespace(
            device=torch.device(name), host=weight, host_group=group, seed_groups={}
        )
        for name in devices
    ]
    for each in made:
        each.network_tensors = partial(
            HostTraining.network_tensors, cast(HostTraining, each)
        )
    return cast(list[HostTraining], made)


def test_the_limit_is_for_the_hosts_of_each_gpu_with_their_seeds() -> None:
    two_copies = 2 * 8 / 1024  # MiB of one host
    run = RunConfig(max_device_copies_mib=2 * two_copies)
    assert copies_to_pin(run, on_gpus("cuda:0", "cuda:0")) == 0
    assert copies_to_pin(run, on_gpus("cuda:0", "cuda:1", "cuda:0", "cuda:1")) == 0
    assert copies_to_pin(run, on_gpus("cuda:0", "cuda:1", "cuda:0")) == 0
    assert copies_to_pin(run, on_gpus("cuda:0", "cuda:0", "cuda:0")) == 1
    assert copies_to_pin(run, on_gpus("cuda:0", "cuda:0"), seed_parameters=1) == 1
    assert copies_to_pin(run, on_gpus("cuda:0"), seed_parameters=1024) == 0
    assert copies_to_pin(run, on_gpus("cuda:0"), seed_parameters=1025) == 1
    assert copies_to_pin(RunConfig(), on_gpus("cuda:0"), seed_parameters=10**9) == 0


def test_on_a_cpu_the_limit_has_no_effect() -> None:
    with rig(run={"max_device_copies_mib": 1e-6}) as world:
        assert world.env.execution.pinned == 0
        world.step()
        assert all(
            set(held) == {"cpu"} for held in world.env.backend.map_hosts(copies_held)
        )
    assert copies_to_pin(RunConfig(max_device_copies_mib=1e-6), [make_training()]) == 0


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), "much"])
def test_a_limit_is_a_positive_number(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^run\.max_device_copies_mib: Input should be"
    ):
        TrainingConfig.parse({"run": {"max_device_copies_mib": value}})


# --- the same bits from anywhere

RECORD = ValidationRecord(loss=1.0, committed=50.0, all_off=40.0, all_off_loss=1.5)


def course(pinned: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """A host that trains, fossilizes, goes bad and is rolled back at random: its tensors after every epoch."""
    dice = random.Random(seed)
    config = tiny_config(
        horizon=60, governor={"snapshot_every": 2, "max_rollbacks": 100}
    )
    training = make_training(config)
    governor = Governor(config.governor, training.durations, 10, pinned)
    seen: list[dict[str, torch.Tensor]] = []
    for episode in range(2):
        training.reset(0, episode)
        governor.reset()
        governor.snapshot_if_due(
            training, RECORD, unmeasured_fossils(training), fossilized=False
        )
        for _ in range(12):
            roll = dice.random()
            empty = [site.name for site in training.sites if site.seed is None]
            if roll < 0.2 and empty:
                plant(training, dice.choice(empty), "norm", stage=SeedStage.FOSSILIZED)
            train(training)
            if roll > 0.6:
                governor.roll_back(training)
            else:
                governor.snapshot_if_due(
                    training,
                    RECORD,
                    unmeasured_fossils(training),
                    fossilized=roll < 0.2,
                )
            if roll > 0.9:  # as a run that was stopped and resumed
                state = governor.state_dict()
                governor = Governor(config.governor, training.durations, 10, pinned)
                governor.load_state_dict(state, training.device)
            seen.append(tensors_of(training, tuple(training.fossils())))
    return seen


@pytest.mark.parametrize("seed", range(2))
def test_rollbacks_are_the_same_bits_wherever_snapshots_lie(seed: int) -> None:
    expected = course(0, seed)
    for pinned in PLACEMENTS[1:]:
        found = course(pinned, seed)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same_bits(one, other)


def test_the_newest_snapshot_moves_before_its_storage_is_filled_again() -> None:
    """This holds after a fallback to the older one, which is then the only one; storage stays in place."""
    config = tiny_config(horizon=60, governor={"snapshot_every": 1})
    training = make_training(config)
    governor = Governor(config.governor, training.durations, 10, 1)
    states = []
    for _ in range(4):
        assert governor.snapshot_if_due(
            training, RECORD, unmeasured_fossils(training), fossilized=False
        )
        states.append(tensors_of(training))
        train(training)
        assert [snapshot.copies.pinned for snapshot in governor._generations] == [
            False,
            True,
        ]
    places = {
        snapshot.copies.pinned: snapshot.copies.tensors["host.segments.0.0.weight"]
        for snapshot in governor._generations
    }
    for _ in range(2):
        governor.roll_back(training)
    same_bits(tensors_of(training), states[2])
    assert [snapshot.copies.pinned for snapshot in governor._generations] == [
        True,
        False,
    ]
    train(training)
    now = tensors_of(training)
    assert governor.snapshot_if_due(
        training, RECORD, unmeasured_fossils(training), fossilized=False
    )
    assert [snapshot.copies.pinned for snapshot in governor._generations] == [
        False,
        True,
    ]
    for snapshot in governor._generations:
        assert (
            snapshot.copies.tensors["host.segments.0.0.weight"]
            is places[snapshot.copies.pinned]
        )
    train(training, 2)
    governor.roll_back(training)
    same_bits(tensors_of(training), now)
    governor.roll_back(training)
    same_bits(tensors_of(training), states[2])


def test_an_env_puts_its_copies_where_its_placement_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("esper.env.vector_env.copies_to_pin", lambda *_arguments: 1)
    with rig(n_envs=2, run={"max_device_copies_mib": 1.0}) as world:
        assert world.env.execution.pinned == 1
        for host in world.env.backend.hosts:
            assert [
                snapshot.copies.pinned for snapshot in host.governor._generations
            ] == [False, True]


def test_the_seeds_that_are_allowed_for_are_the_largest_within_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []

    def place(_run: object, _hosts: object, seed_parameters: int) -> int:
        sizes.append(seed_parameters)
        return 0

    monkeypatch.setattr("esper.env.vector_env.copies_to_pin", place)
    for budget in (0.5, 1e6):
        with rig(env={"parameter_budget": budget}) as world:
            largest = world.env.rules.choices.parameters.max(axis=1).sum()  # type: ignore[union-attr]
            host = world.env.host_parameters
    assert sizes == [int(0.5 * host), int(largest)]


def test_held_copies_are_counted_by_host() -> None:
    """Two snapshots of the host alone: twice its tensors and their momentum."""
    with rig(n_envs=2, horizon=8, governor={"snapshot_every": 1}) as world:
        for _ in range(2):
            world.step()
        host = world.training().host
        momentum = sum(parameter.nbytes for parameter in host.parameters())
        one = sum(tensor.nbytes for tensor in host.state_dict().values()) + momentum
        assert [dict(held) for held in world.env.backend.map_hosts(copies_held)] == [
            {"cpu": 2 * one}
        ] * 2


@pytest.mark.finding("C4")
@pytest.mark.slow
@pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from /proc")
def test_memory_is_flat_over_1000_episodes() -> None:
    """Each with a seed, snapshots after every epoch, and a rollback."""
    with rig(horizon=4, governor={"snapshot_every": 1}) as world:
        sizes = []
        for episode in range(1, 1001):
            world.reset()
            world.grow("r0c0", SeedStage.TRAINING, "norm")
            DAMAGE["NaN weight"](world.training())
            world.step()
            assert world.host().governor.rollbacks == 1
            world.events.clear()
            if episode in (100, 1000):
                gc.collect()
                sizes.append(resident_mib())
        # A snapshot is 6 KiB: one that stayed behind in every episode would be 5 MiB.
        assert sizes[1] - sizes[0] < 3, sizes
