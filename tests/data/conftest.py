"""Every test here runs with one intra-op thread, and finds no data of the machine."""

from pathlib import Path

import pytest

from esper.data import images
from tests.core_helpers import one_thread
from tests.data.user_files import GOOD

__all__ = ["one_thread"]


@pytest.fixture(autouse=True)
def no_data_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path / "default"))
    monkeypatch.setattr(images, "SYSTEM", tmp_path / "no_package")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of the user whose function makes a task."""
    made = tmp_path / "mine.py"
    made.write_text(GOOD)
    return made
