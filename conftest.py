"""Options of all tests, and the number of processes that run them."""

from __future__ import annotations

import gc
import os
import signal
import time

import pytest

MAX_WORKERS = 4  # each imports torch, which takes 0.6 GB
# Networks of the tests are so small that the threads of one operator would mostly wait for one another, and workers
# share the cores. torch reads this when it is imported; processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads of many tests come and go; with an arena of memory for each of them, glibc keeps what they have freed.
os.environ.setdefault("MALLOC_ARENA_MAX", "2")
# A shell that starts pytest in the background has it ignore Ctrl-C, which tests send to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--minutes",
        type=float,
        help="start no test later than this many minutes after the first one, which is another one each day",
    )
    parser.addoption("--cores", action="store_true", help="run the named tests on several cores, as the whole suite is")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Runs the whole suite on several cores, if pytest-xdist is there; its ``-n`` or ``-p no:xdist`` overrule this.

    Tests that are named on the command line run in one process, where ``-s`` and ``--pdb`` work, unless ``--cores`` is
    given.
    """
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS or config.getoption("--cores")
    asked = config.getoption("numprocesses", 0) is not None  # 0 if the plugin is missing
    if not whole or asked or config.getoption("usepdb") or hasattr(config, "workerinput"):
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores > 1:
        config.option.numprocesses = min(cores, MAX_WORKERS)
        config.option.dist = "worksteal"  # tests differ in length by a factor of 10,000


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--minutes``, starts each day elsewhere in the list, so that in the course of time every test is run."""
    if config.getoption("--minutes") is not None:
        start = int(len(items) * (int(time.time() // 86400) * GOLDEN % 1.0))
        items[:] = items[start:] + items[:start]


def pytest_collection_finish() -> None:
    """Exempts torch and the collected tests from garbage collection, which took a twentieth of the time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes: float | None = item.config.getoption("--minutes")
    if minutes is None:
        return
    end = item.config.stash.setdefault(END, time.monotonic() + 60 * minutes)
    if time.monotonic() >= end:
        pytest.skip(f"not started: {minutes:g} minutes have passed")


GOLDEN = (5**0.5 - 1) / 2  # its multiples are spread evenly between 0 and 1
END = pytest.StashKey[float]()
