"""Options of all tests."""

from __future__ import annotations

import time

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--minutes", type=float, help="start no test later than this many minutes after the first one")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes: float | None = item.config.getoption("--minutes")
    if minutes is None:
        return
    end = item.config.stash.setdefault(END, time.monotonic() + 60 * minutes)
    if time.monotonic() >= end:
        pytest.skip(f"not started: {minutes:g} minutes have passed")


END = pytest.StashKey[float]()
