"""Every example runs as its page says, at small size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
FILES = sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", FILES)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, str(EXAMPLES / name), "4"]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert finished.returncode == 0, finished.stderr
    assert "test: " in finished.stdout


def test_the_page_lists_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert [name for name in FILES if f"`{name}`" not in page] == []
