"""Ends of processes with worker pools: none hangs or crashes, whatever was not closed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

HEAD = """
import gc, os, signal, sys, threading, time
from esper._runtime import Cancelled, WorkerPool
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupt_soon(seconds=0.2):
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own; fails if that hangs."""
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", HEAD + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def output(body: str) -> str:
    done = run(body)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


FORGOTTEN = {
    "idle": "pool = WorkerPool(2); pool.run([lambda: None], [0]); print('end')",
    "never used": "pool = WorkerPool(2); print('end')",
    "collected": "pool = WorkerPool(2); del pool; gc.collect(); print('end')",
    "in a cycle": "a = {}; a['pool'] = WorkerPool(2); a['a'] = a; del a; gc.collect(); print('end')",
    "held by its own start": """
        class Owner:
            def start(self, worker): pass
        owner = Owner(); owner.pool = WorkerPool(2, owner.start); del owner; gc.collect()
        while threading.active_count() > 1: time.sleep(0.01)
        print('end')""",
    "collected in a task": """
        holder = [WorkerPool(2), WorkerPool(2)]
        holder[1].run([lambda: holder.pop(0)], [0]); print('end')""",
    "many": "pools = [WorkerPool(2) for _ in range(30)]; print('end')",
    "after an error": """
        pool = WorkerPool(2)
        sys.excepthook = lambda *_: print('end')
        pool.run([lambda: 1 // 0], [0])
        import atexit; atexit.register(os._exit, 0)
        raise KeyError""",
    "at work for a daemon": """
        pool = WorkerPool(2)
        def spin():
            while not pool.cancelled: sum(range(1000))
        daemon = threading.Thread(target=lambda: pool.run([spin] * 4, [0] * 4), daemon=True)
        daemon.start(); time.sleep(0.1); print('end')""",
    "runs of a daemon without end": """
        pool = WorkerPool(2)
        def play():
            while True: pool.run([lambda: None] * 4, [0] * 4)
        sys.stderr = None  # the daemon finds its pool closed
        threading.Thread(target=play, daemon=True).start(); time.sleep(0.1); print('end')""",
    "used by a finalizer after all hooks": """
        class Owner:
            def __del__(self):
                try:
                    self.pool.run([lambda: None], [0])
                except RuntimeError:
                    self.pool.close(); os.write(1, b'end\\n')
        owner = Owner(); owner.pool = WorkerPool(2)
        import types; sys.modules['keeper'] = types.SimpleNamespace(owner=owner)""",
    "used and closed by another hook": """
        import atexit
        pool = WorkerPool(2)
        atexit.register(lambda: (pool.run([lambda: print('end')], [0]), pool.close()))""",
}


@pytest.mark.parametrize("body", FORGOTTEN.values(), ids=FORGOTTEN)
def test_a_forgotten_pool_lets_the_process_end(body: str) -> None:
    assert output(body) == "end\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["at work for a daemon", "runs of a daemon without end", "collected", "many"],
)
def test_a_forgotten_pool_lets_the_process_end_every_time(name: str) -> None:
    for _ in range(20):
        assert output(FORGOTTEN[name]) == "end\n"


@pytest.mark.slow
def test_a_task_without_end_does_not_keep_the_process() -> None:
    body = """
        pool = WorkerPool(2)
        threading.Thread(target=lambda: pool.run([lambda: time.sleep(3600)], [0]), daemon=True).start()
        time.sleep(0.1); print('end')"""
    assert output(body) == "end\n"


def test_ctrl_c_waits_for_running_tasks_and_starts_no_more() -> None:
    body = """
        pool, done = WorkerPool(1), []
        def long():
            while not pool.cancelled: time.sleep(0.01)
            time.sleep(0.1); done.append('long')
        interrupt_soon()
        try:
            pool.run([long, lambda: done.append('late')], [1, 0])
        except KeyboardInterrupt:
            print(done, pool.cancelled)
        print(pool.run([lambda: done.append('again')], [0])[0][0], done)
        pool.close()"""
    assert output(body) == "['long'] True\nNone ['long', 'again']\n"


def test_a_second_ctrl_c_leaves_at_once_and_the_next_run_comes_after_the_old_task() -> (
    None
):
    body = """
        pool, done, release = WorkerPool(1), [], threading.Event()
        def long():
            release.wait(); done.append('long')
        interrupt_soon(0.2); interrupt_soon(0.6)
        try:
            pool.run([long, lambda: done.append('late')], [1, 0])
        except KeyboardInterrupt:
            print(done)
        threading.Timer(0.1, release.set).start()
        print(pool.run([lambda: done.append('again')], [0])[0][0], done)
        print(sys.getrefcount(long))"""
    assert output(body) == "[]\nNone ['long', 'again']\n2\n"


def test_any_handler_that_raises_interrupts() -> None:
    body = """
        def handler(number, frame): raise SystemExit(7)
        signal.signal(signal.SIGTERM, handler)
        pool = WorkerPool(2)
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
        def long():
            while not pool.cancelled: time.sleep(0.01)
        pool.run([long], [0])"""
    done = run(body)
    assert (done.returncode, done.stderr) == (7, "")


def test_ctrl_c_while_another_thread_has_the_turn() -> None:
    body = """
        pool, began, release = WorkerPool(1), threading.Event(), threading.Event()
        first = threading.Thread(target=lambda: pool.run([lambda: (began.set(), release.wait())], [0]))
        first.start(); began.wait(); interrupt_soon()
        try:
            pool.run([lambda: print('never')], [0])
        except KeyboardInterrupt:
            print('left', pool.cancelled)
        release.set(); first.join()"""
    assert output(body) == "left False\n"


def test_killed_by_ctrl_c_without_a_handler_around() -> None:
    done = run(
        "pool = WorkerPool(2)\ninterrupt_soon()\npool.run([lambda: time.sleep(0.5)] * 2, [0] * 2)"
    )
    assert done.returncode == -signal.SIGINT
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_forked_child_has_no_workers_and_ends() -> None:
    """Workers of a data loader are forked like this beside a pool."""
    body = """
        import warnings
        warnings.simplefilter('ignore', DeprecationWarning)  # later Pythons advise against it
        pool = WorkerPool(2)
        pool.run([lambda: None], [0])
        child = os.fork()
        if child == 0:
            try:
                pool.run([lambda: None], [0])
            except RuntimeError as error:
                print(error)
            pool.close()
            fresh = WorkerPool(2)
            print(fresh.run([lambda: None], [0])[0][0])
            del pool; gc.collect()
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), pool.run([lambda: None], [0])[0][0])"""
    assert output(body) == (
        "this worker pool belongs to the parent process: it was created before the fork\nNone\n3 None\n"
    )
