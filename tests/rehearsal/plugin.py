"""A pytest plugin that runs the tests of this process on the fake GPU: ``pytest -p tests.rehearsal.plugin``.

The environment says how: REHEARSAL_SEED (how streams interleave), REHEARSAL_DEVICES (1 or 2), and REHEARSAL_PART, such
as 2/4 for the second quarter of the tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.rehearsal import dispatch, fake_runtime


def pytest_configure() -> None:
    dispatch.start(int(os.environ.get("REHEARSAL_SEED", "1")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    part, parts = map(int, os.environ.get("REHEARSAL_PART", "1/1").split("/"))
    items[:] = items[part - 1 :: parts]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test fails if a twin failed in it, or if it broke a rule that no error code of CUDA tells."""
    dispatch.take_failures()
    yield
    fake_runtime.drain_all()
    found = dispatch.take_failures()
    assert not found, "\n".join(found)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    whats = (
        "operators",
        "kernel launches",
        "captures",
        "broken captures",
        "graph launches",
        "waits",
    )
    terminalreporter.write_line(
        "rehearsal: "
        + ", ".join(f"{fake_runtime.count(what)} {what}" for what in whats)
    )
