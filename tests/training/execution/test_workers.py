"""Workers and the ownership of random numbers."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import pytest
import torch

from esper._runtime import physical_cores
from esper.training.execution.workers import WorkerExecutor
from esper.training.executor import Cancelled, HostError


@dataclass
class Place:
    index: int
    epoch: int = 3
    batch: int = 5
    done: bool = False


def test_every_env_is_worked_on_once_with_one_thread() -> None:
    envs = [Place(index) for index in range(7)]
    threads: list[int] = []
    torch.set_num_threads(
        2
    )  # of the thread that owns the envs; the fixture puts it back

    def work(env: Place) -> None:
        threads.append(torch.get_num_threads())
        assert threading.current_thread() is not threading.main_thread()
        env.done = True

    with WorkerExecutor(3) as executor:
        executor.run(work, envs)
        assert torch.get_num_threads() == 2
    assert all(env.done for env in envs)
    assert threads == [1] * 7


@pytest.mark.finding("M12")
def test_an_error_names_env_epoch_and_batch_and_the_others_finish() -> None:
    envs = [Place(index) for index in range(4)]

    def work(env: Place) -> None:
        if env.index in (1, 3):
            raise ZeroDivisionError("by zero")
        env.done = True

    with (
        WorkerExecutor(2) as executor,
        pytest.raises(
            HostError, match="env 1, epoch 3, batch 5: ZeroDivisionError: by zero"
        ) as e,
    ):
        executor.run(work, envs)
    assert isinstance(e.value.__cause__, ZeroDivisionError)
    assert [env.done for env in envs] == [True, False, True, False]


@pytest.mark.finding("M12")
def test_the_other_errors_are_noted_and_an_exit_is_an_exit() -> None:
    def work(env: Place) -> None:
        if env.index == 2:
            raise SystemExit(4)
        if env.index:
            raise ValueError(f"of {env.index}")

    with WorkerExecutor(2) as executor:
        with pytest.raises(HostError, match="env 1,") as failed:
            executor.run(work, [Place(0), Place(1), Place(3)])
        assert failed.value.__notes__ == [
            "It was not the only one: env 3, epoch 3, batch 5: ValueError: of 3"
        ]
        with pytest.raises(SystemExit) as left:
            executor.run(work, [Place(1), Place(2)])
    assert left.value.code == 4


def test_the_env_that_took_longest_is_begun_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs: list[list[float]] = []

    class Pool:
        """A pool that returns given outcomes, with 10 - i seconds for host i."""

        count = 1

        def __init__(self, *_arguments: object, **_options: object) -> None: ...

        def run(
            self, tasks: list[Callable[[], None]], given: list[float]
        ) -> list[tuple[None, float]]:
            costs.append(given)
            for task in tasks:
                task()
            return [(None, 10.0 - env.index) for env in envs]

        def close(self) -> None: ...

    monkeypatch.setattr("esper._runtime.WorkerPool", Pool)
    with WorkerExecutor(1) as executor:
        for envs in (
            [Place(1), Place(2)],
            [Place(2), Place(4), Place(1)],
            [Place(1), Place(2), Place(4)],
        ):
            executor.run(lambda env: None, envs)
    assert costs[0] == [inf, inf]
    assert costs[1] == [8.0, inf, 9.0], "of an unknown one the worst is expected"
    assert costs[2] == [9.0, 8.0, 6.0]


def test_cancelled_work_stops_between_batches_and_the_next_run_is_whole() -> None:
    envs = [Place(index, batch=0) for index in range(4)]

    def epoch(env: Place) -> None:
        for env.batch in range(1000):
            if env.batch == 2:
                executor.cancel()
            if executor.cancelled:
                raise Cancelled("between batches")
        env.done = True

    def finish(env: Place) -> None:
        env.done = not executor.cancelled

    with WorkerExecutor(1) as executor:
        with pytest.raises(Cancelled, match="for env 0, 1, 2, 3"):
            executor.run(epoch, envs)
        assert [env.batch for env in envs] == [2, 0, 0, 0]
        assert executor.cancelled
        executor.run(finish, envs)
    assert all(env.done for env in envs)


def test_an_error_matters_more_than_the_cancellation_after_it() -> None:
    def work(env: Place) -> None:
        executor.cancel()
        raise ZeroDivisionError("first")

    with WorkerExecutor(1) as executor, pytest.raises(HostError, match=r"env 0.*first"):
        executor.run(work, [Place(0), Place(1)])


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="the system cannot pin threads"
)
def test_workers_stay_on_their_cores_only_if_they_fill_the_machine() -> None:
    """Two processes with one worker each would be kept on the same core."""
    cores, everywhere = physical_cores(), os.sched_getaffinity(0)
    for count in {1, cores - 1, cores, cores + 1} - {0}:
        places: list[set[int]] = []
        with WorkerExecutor(count) as executor:
            executor.run(
                lambda env: places.append(os.sched_getaffinity(0)),  # noqa: B023
                [Place(index) for index in range(count)],
            )
        assert all((place < everywhere) == (count == cores > 1) for place in places)
