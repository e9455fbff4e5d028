"""Every test here runs with one intra-op thread, and finds no data of the machine."""

from pathlib import Path

import pytest

from tests.core_helpers import one_thread

__all__ = ["one_thread"]


@pytest.fixture(autouse=True)
def no_data_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "default"))
