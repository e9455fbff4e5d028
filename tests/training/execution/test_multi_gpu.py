"""Hosts on several devices: each has the same numbers as on one, and errors of all devices are one error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from esper.agents.controller import RandomController
from esper.config import ConfigError, TrainingConfig
from esper.env.make import EnvMaker, make_env
from esper.env.vector_env import GrowthVectorEnv
from esper.files.system_info import check_devices
from esper.telemetry.event import Event
from esper.telemetry.record import stable_record
from esper.training.execution.multi_gpu import MultiGpuExecutor, device_index
from esper.training.execution.ranks import RunRanks
from esper.training.execution.workers import WorkerExecutor
from esper.training.executor import Cancelled, DeviceFailed, HostError
from tests.core_helpers import DAMAGE, digits, flat_baseline, tiny_config
from tests.run.run_helpers import assert_same_bits, flat


@dataclass
class Env:
    index: int
    epoch: int = 3
    batch: int = 1


class Noting:
    """The executor of a device that records their calls, with the indices of envs, and the threads that make them."""

    captures = False

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.threads: list[threading.Thread] = []
        self.calls: list[tuple[str, list[int]]] = []

    def run(self, _work: Any, _envs: Any) -> None:
        self.close()

    def train(self, hosts: list[Env], _then: Any = None) -> None:
        self.calls.append(("train", [env.index for env in hosts]))

    def adopt(self, hosts: list[Env]) -> None:
        self.calls.append(("adopt", [env.index for env in hosts]))

    def release(self, hosts: list[Env]) -> None:
        self.calls.append(("release", [env.index for env in hosts]))

    def close(self) -> None:
        self.threads.append(threading.current_thread())
        if self.error is not None:
            raise self.error


@contextmanager
def three() -> Iterator[MultiGpuExecutor]:
    with MultiGpuExecutor(
        [WorkerExecutor(1), WorkerExecutor(1), WorkerExecutor(1)]
    ) as executor:
        yield executor


@pytest.mark.finding("G1")
def test_envs_take_devices_in_turn() -> None:
    devices = [Noting(), Noting(), Noting()]
    with MultiGpuExecutor(devices) as executor:  # type: ignore[arg-type]
        for call in (executor.train, executor.adopt, executor.release):
            call([Env(i) for i in range(8)])  # type: ignore[operator,list-item]
    for device, mine in zip(devices, [[0, 3, 6], [1, 4, 7], [2, 5]], strict=True):
        assert device.calls == [("train", mine), ("adopt", mine), ("release", mine)]
    assert [device_index(i, 3) for i in range(5)] == [0, 1, 2, 0, 1]


@pytest.mark.finding("M12")
def test_errors_of_all_devices_are_one_error_of_the_first_env() -> None:
    def breaks(env: Env) -> None:
        if env.index in (1, 2, 4):
            raise ArithmeticError(f"in {env.index}")

    with (
        three() as executor,
        pytest.raises(
            HostError, match="env 1, epoch 3, batch 1: ArithmeticError: in 1"
        ) as found,
    ):
        executor.run(breaks, [Env(i) for i in range(6)])
    assert found.value.env == 1
    assert [str(cause) for cause in found.value.causes] == ["in 1", "in 4", "in 2"]
    assert len(found.value.__notes__) == 2


def test_an_error_outside_of_hosts_comes_first_and_names_the_others() -> None:
    broken = (
        HostError(Env(0), ArithmeticError("a host's")),
        HostError(Env(1), ArithmeticError("another's")),
    )
    devices: list[Any] = [
        Noting(broken[0]),
        Noting(broken[1]),
        Noting(DeviceFailed("the third")),
    ]
    executor = MultiGpuExecutor(devices)
    with pytest.raises(DeviceFailed, match="the third") as caught:
        executor.run(lambda _env: None, [Env(i) for i in range(3)])
    assert [
        f"env {i}, epoch 3" in note for i, note in enumerate(caught.value.__notes__)
    ] == [True, True]
    with pytest.raises(DeviceFailed, match="the third"):
        executor.close()


def test_the_work_of_a_device_is_always_on_the_same_thread() -> None:
    """The thread is the same if the devices before it have no work."""
    devices: list[Any] = [Noting(), Noting(), Noting()]
    with MultiGpuExecutor(devices) as executor:
        for indices in ([0, 1, 2], [2], [1, 2], [2, 0], [1]):
            executor.run(lambda _env: None, [Env(i) for i in indices])
    threads = [set(device.threads) for device in devices]
    assert [len(own) for own in threads] == [1, 1, 1]
    assert len(set.union(*threads)) == 3


@pytest.mark.parametrize("error", [None, RuntimeError("a sticky fault")])
def test_a_device_is_closed_on_its_thread_which_ends_after_that(
    error: Exception | None,
) -> None:
    devices: list[Any] = [Noting(), Noting(), Noting()]
    executor = MultiGpuExecutor(devices)
    executor.run(lambda _env: None, [Env(i) for i in range(3)])
    devices[1].error = error
    if error is None:
        executor.close()
    else:
        with pytest.raises(RuntimeError, match="a sticky fault"):
            executor.close()
    executor.close()  # does nothing
    assert [len(device.threads) for device in devices] == [2, 2, 2]
    assert all(
        worked is closed for worked, closed in (device.threads for device in devices)
    )
    assert not any(thread.is_alive() for device in devices for thread in device.threads)


def test_cancelling_reaches_all_devices() -> None:
    begun = threading.Barrier(4, timeout=20)

    def work(env: Env) -> None:
        if env.index < 3:
            begun.wait()
            for _ in range(2000):
                if executor.cancelled:
                    raise Cancelled("seen")
                threading.Event().wait(0.01)

    with three() as executor:
        canceller = threading.Thread(target=lambda: (begun.wait(), executor.cancel()))
        canceller.start()
        with pytest.raises(Cancelled):
            executor.run(work, [Env(i) for i in range(9)])
        canceller.join()
        executor.run(lambda _env: None, [Env(0)])  # the next run is free


def grown(devices: int, envs: int = 4) -> tuple[list[Any], list[dict[str, Any]]]:
    """Hosts spread over this number of devices, under random actions, with one host that breaks."""
    told: list[Event] = []
    config = tiny_config(envs, 6, run={"lanes": 2}, env={"embargo": 1})
    copies = [digits().to(torch.device("cpu")) for _ in range(devices - 1)]
    env = GrowthVectorEnv(
        digits(), config, told.append, flat_baseline(6), elsewhere=copies
    )
    assert (
        len({id(training.totals.accumulators) for training in env.training}) == devices
    )
    chance = RandomController(env.action_spec, env.layout, envs, 3)
    seen: list[Any] = []
    observation, info = env.reset()
    chance.begin()
    for step in range(6):
        if step == 3:
            DAMAGE["NaN weight"](env.training[3])
        observation, rewards, _, _, info = env.step(
            chance.act(observation, info["action_mask"])
        )
        seen += [observation, rewards]
    seen += [*flat(env.state_dict()).values(), env.test_accuracy()]
    env.close()
    return seen, [stable_record(event) for event in told]


@pytest.mark.finding("T1")
def test_hosts_on_several_devices_have_the_bits_of_one() -> None:
    """Seeds, rollbacks, validation, test accuracy and events; three devices here are three pools of workers."""
    (one, told), (several, told_too) = grown(1), grown(3)
    assert told == told_too
    assert {"GovernorRollback", "StageChanged"} <= {event["event"] for event in told}
    assert_same_bits(one, several)


def test_no_more_devices_than_hosts_are_used() -> None:
    config = TrainingConfig.parse(
        {"run": {"device": "cpu,cpu,cpu"}, "env": {"n_envs": 2, "episode_length": 2}}
    )
    env = make_env(config)
    assert isinstance(env, GrowthVectorEnv)
    assert (len(env.tasks), isinstance(env.executor, MultiGpuExecutor)) == (2, True)
    env.close()
    alone = make_env(config.with_values(env={"n_envs": 1}))
    assert isinstance(alone, GrowthVectorEnv)
    assert isinstance(alone.executor, WorkerExecutor)
    alone.close()


def test_an_env_whose_gpu_has_failed_ends_its_workers_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = make_env(TrainingConfig.parse({"env": {"n_envs": 2, "episode_length": 2}}))
    assert isinstance(env, GrowthVectorEnv)
    close, closed = env.executor.close, []

    def fail() -> None:
        close()
        raise RuntimeError("a sticky fault")

    monkeypatch.setattr(env.executor, "close", fail)
    monkeypatch.setattr(env.backend.trainer, "close", lambda: closed.append("trainer"))
    with pytest.raises(RuntimeError, match="a sticky fault"):
        env.close()
    assert closed == ["trainer"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("cpu,cpu", "several devices must be distinct GPUs, such as cuda:0,cuda:1"),
        ("cpu,cuda:9", "device 'cuda:9' is not available"),
        ("cpu,", "unknown device ''"),
        ("cpu,abacus", "unknown device 'abacus'"),
        ("cuda:1,cuda:1", "must be distinct GPUs"),
        ("cuda,cuda:0", "must be distinct GPUs"),
    ],
)
def test_devices_that_cannot_be_are_refused(
    names: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match=message):
        check_devices(names)


@pytest.mark.parametrize(
    ("gpus", "found"), [(0, "cpu"), (1, "cuda:0"), (3, "cuda:0,cuda:1,cuda:2")]
)
def test_auto_is_all_gpus_of_the_machine_or_its_cpu(
    gpus: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert ",".join(map(str, check_devices("auto"))) == found
    maker = EnvMaker.of(
        TrainingConfig.parse({"task": {"name": "planted"}, "run": {"device": "auto"}})
    )
    assert maker.config.run.device == found  # recorded, and chosen only once
    of_ranks = [
        RunRanks(rank, 3, local_rank=rank, local_size=3).own(maker.config.run).device
        for rank in range(3)
    ]
    assert set(of_ranks) == set(found.split(","))
