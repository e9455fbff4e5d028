"""The scripts in benchmarks/ start: what they import exists."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if not path.name.startswith("test_"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_imports_what_exists(name: str) -> None:
    assert runpy.run_path(str(FOLDER / name), run_name="imported")["__doc__"]
