"""The worker pool: every task runs once, longest first; errors, cancellation and closing."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from esper._runtime import Cancelled, WorkerPool, physical_cores

PATIENCE = 30.0
"""Seconds after which a test that waits fails instead of hanging."""


@contextmanager
def pool_of(
    workers: int = 2, start: Callable[[int], object] | None = None
) -> Iterator[WorkerPool]:
    pool = WorkerPool(workers, start, pin=False)
    try:
        yield pool
    finally:
        pool.close()


def nothing() -> None:
    pass


def wait_for(event: threading.Event) -> None:
    assert event.wait(PATIENCE)


@given(
    st.lists(st.floats(min_value=0, allow_nan=False), max_size=20), st.integers(1, 5)
)
def test_every_task_runs_once_and_its_outcome_has_its_place(
    costs: list[float], workers: int
) -> None:
    results: list[list[int]] = [[] for _ in costs]

    def task(i: int) -> None:
        results[i].append(i)
        if i % 3 == 0:
            raise ValueError(i)

    with pool_of(workers) as pool:
        outcomes = pool.run([lambda i=i: task(i) for i in range(len(costs))], costs)
    assert results == [[i] for i in range(len(costs))]
    assert [type(error) for error, _ in outcomes] == [
        ValueError if i % 3 == 0 else type(None) for i in range(len(costs))
    ]
    assert [error.args[0] for error, _ in outcomes if error] == list(
        range(0, len(costs), 3)
    )
    assert all(seconds > 0 for _, seconds in outcomes)


def test_longest_first_and_equals_in_the_order_given() -> None:
    costs = [1.0, 5.0, inf, 5.0, 0.0, 2.0]
    began: list[int] = []
    with pool_of(1) as pool:
        pool.run([lambda i=i: began.append(i) for i in range(6)], costs)
    assert began == [2, 1, 3, 5, 0, 4]


def test_an_error_keeps_its_traceback_and_any_exception_comes_back() -> None:
    def fail() -> None:
        raise SystemExit(3)

    with pool_of() as pool:
        (exit_, _), (zero, _) = pool.run([fail, lambda: 1 // 0], [0, 0])  # type: ignore[list-item, return-value]
    assert isinstance(exit_, SystemExit)
    assert exit_.code == 3
    assert isinstance(zero, ZeroDivisionError)
    assert zero.__traceback__ is not None


def test_ten_thousand_tiny_tasks() -> None:
    done, numbers = [0] * 10_000, count()

    def task(i: int) -> None:
        done[i] += 1
        next(numbers)

    with pool_of(4) as pool:
        for _ in range(2):
            outcomes = pool.run(
                [lambda i=i: task(i) for i in range(10_000)],
                [float(i % 7) for i in range(10_000)],
            )
            assert all(error is None for error, _ in outcomes)
        for _ in range(1000):
            pool.run([nothing, nothing], [0, 0])
    assert done == [2] * 10_000
    assert next(numbers) == 20_000


def test_workers_keep_their_thread_and_its_state() -> None:
    """A thread-local of one run is there in the next, the threads are Python's own, and none is left behind."""
    before, local = threading.enumerate(), threading.local()
    meeting = threading.Barrier(3, timeout=PATIENCE)
    names: set[str] = set()

    def start(worker: int) -> None:
        local.worker = worker

    def task() -> None:
        meeting.wait()  # so that each worker has one
        thread = threading.current_thread()
        assert thread.name == f"worker-{local.worker}"
        assert not isinstance(thread, threading._DummyThread)
        names.add(thread.name)

    with pool_of(3, start) as pool:
        for _ in range(5):
            assert [error for error, _ in pool.run([task] * 3, [0] * 3)] == [None] * 3
        assert len(threading.enumerate()) == len(before) + 3
    assert names == {"worker-0", "worker-1", "worker-2"}
    assert threading.enumerate() == before


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="the system cannot pin threads"
)
def test_pinned_workers_are_on_different_cores() -> None:
    mine, pool = os.sched_getaffinity(0), WorkerPool()
    meeting = threading.Barrier(pool.count, timeout=PATIENCE)
    places: list[frozenset[int]] = []

    def task() -> None:
        meeting.wait()
        places.append(frozenset(os.sched_getaffinity(0)))

    pool.run([task] * pool.count, [0] * pool.count)
    pool.close()
    assert pool.count == physical_cores() == len(places)
    assert sorted(map(sorted, places)) == sorted(pool.cpus)
    assert sum(map(len, places)) == len(frozenset().union(*places)), (
        "two workers share a CPU"
    )
    assert frozenset().union(*places) == mine
    assert os.sched_getaffinity(0) == mine, "the caller stays free"


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="the system cannot pin threads"
)
@pytest.mark.parametrize(("workers", "pin"), [(1, False), (physical_cores() + 1, True)])
def test_workers_that_are_not_pinned_go_everywhere(workers: int, pin: bool) -> None:
    pool, places = WorkerPool(workers, pin=pin), []
    pool.run([lambda: places.append(os.sched_getaffinity(0))] * workers, [0] * workers)
    pool.close()
    assert pool.cpus == [[]] * workers
    assert places == [os.sched_getaffinity(0)] * workers


def test_cancel_starts_no_more_tasks_and_informs_running_ones() -> None:
    began, cancelled = threading.Event(), threading.Event()
    done: list[str] = []

    def long() -> None:
        assert not pool.cancelled
        began.set()
        wait_for(cancelled)
        assert pool.cancelled
        done.append("long")

    def from_outside() -> None:
        wait_for(began)
        pool.cancel()
        cancelled.set()

    with pool_of(1) as pool:
        outside = threading.Thread(target=from_outside)
        outside.start()
        outcomes = pool.run([long, lambda: done.append("late")], [1, 0])
        outside.join()
        assert outcomes[0][0] is None
        assert isinstance(outcomes[1][0], Cancelled)
        assert outcomes[1][1] == 0.0
        assert done == ["long"]
        assert pool.cancelled
        assert pool.run([lambda: done.append("again")], [0])[0][0] is None
        assert not pool.cancelled
    assert done == ["long", "again"]


def test_a_task_may_cancel_its_own_run() -> None:
    done: list[int] = []
    with pool_of(1) as pool:
        outcomes = pool.run([nothing, pool.cancel, lambda: done.append(1)], [2, 1, 0])
    assert [type(error) for error, _ in outcomes] == [type(None), type(None), Cancelled]
    assert done == []


def test_two_threads_take_turns() -> None:
    inside, most, runs = 0, 0, 40
    lock = threading.Lock()
    owners: list[str] = []

    def task(owner: str) -> None:
        nonlocal inside, most
        with lock:
            owners.append(owner)
            inside += 1
            most = max(most, len(set(owners[-inside:])))
        with lock:
            inside -= 1

    def play(pool: WorkerPool, owner: str) -> None:
        for _ in range(runs):
            assert all(
                error is None
                for error, _ in pool.run([lambda: task(owner)] * 3, [0] * 3)
            )

    with pool_of(2) as pool:
        threads = [threading.Thread(target=play, args=(pool, owner)) for owner in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert sorted(owners) == ["a"] * 3 * runs + ["b"] * 3 * runs
    assert most == 1, "tasks of two runs were on at the same time"
    assert all(len(set(owners[i : i + 3])) == 1 for i in range(0, len(owners), 3))


def test_run_in_a_task_of_the_same_pool_is_refused_and_of_another_is_not() -> None:
    with pool_of() as pool, pool_of() as other:
        outcomes = pool.run(
            [
                lambda: pool.run([nothing], [0]),
                pool.close,
                lambda: other.run([nothing], [0]),
            ],
            [0] * 3,
        )
    assert [type(error) for error, _ in outcomes] == [
        RuntimeError,
        RuntimeError,
        type(None),
    ]
    assert "a task must not call run() of its own pool" in str(outcomes[0][0])


def test_close_is_final_and_may_be_repeated() -> None:
    pool = WorkerPool(2)
    pool.close()
    pool.close()
    assert pool.closed
    with pytest.raises(RuntimeError, match="closed"):
        pool.run([nothing], [0])


def test_close_from_another_thread_waits_for_running_tasks() -> None:
    began, release = threading.Event(), threading.Event()
    done: list[str] = []

    def long() -> None:
        began.set()
        wait_for(release)
        done.append("long")

    def close() -> None:
        wait_for(began)
        threading.Timer(0.1, release.set).start()
        pool.close()
        assert done == ["long"]
        done.append("closed")

    pool = WorkerPool(1)
    closer = threading.Thread(target=close)
    closer.start()
    outcomes = pool.run([long, lambda: done.append("late")], [1, 0])
    closer.join(PATIENCE)
    assert [type(error) for error, _ in outcomes] == [type(None), Cancelled]
    assert done == ["long", "closed"]


def test_an_error_of_start_is_raised_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(KeyError, match="1"):
        WorkerPool(3, lambda worker: {0: "a", 2: "c"}[worker])
    for thread in threading.enumerate():
        if thread.name.startswith("worker-"):
            thread.join(PATIENCE)
    assert threading.active_count() == before


def test_nothing_is_kept_of_tasks_and_errors() -> None:
    task = lambda: 1 // 0  # noqa: E731  # a function of its own, to count what holds it
    references = sys.getrefcount(task)
    with pool_of() as pool:
        pool.run([task] * 5, [0] * 5)
        assert sys.getrefcount(task) == references


@pytest.mark.parametrize(
    ("tasks", "costs", "error", "words"),
    [
        (
            [nothing],
            [],
            ValueError,
            "expected one cost per task, got 1 tasks and 0 costs",
        ),
        ([nothing, nothing], [0, nan], ValueError, "the cost of task 1 is NaN"),
        ([nothing, 3], [0, 0], TypeError, "task 1 is not callable: 3"),
    ],
)
def test_bad_arguments_are_named(
    tasks: list[Callable[[], object]], costs: list[float], error: type, words: str
) -> None:
    with pool_of() as pool, pytest.raises(error, match=words):
        pool.run(tasks, costs)
