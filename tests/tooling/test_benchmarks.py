"""Scripts in benchmarks/: their imports exist, and those that read results give the right figures."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks.adapters  # noqa: F401  registers controls, once for all tests
from esper.compare import controls

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = sorted(
    path.name for path in FOLDER.glob("*.py") if not path.name.startswith("test_")
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_imports_what_exists(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))  # as `python SCRIPT` does
    # A script that runs under another name must not meet the controls of its module.
    monkeypatch.setattr(controls, "CONTROLS", {})
    assert runpy.run_path(str(FOLDER / name), run_name="imported")["__doc__"]


@pytest.mark.slow
@pytest.mark.parametrize("grow", [[], ["--grow"]], ids=["alone", "grown"])
def test_a_known_script_trains_and_tells_its_score(grow: list[str]) -> None:
    command = [
        sys.executable,
        str(FOLDER / "known_scripts.py"),
        "text",
        "--quick",
        *grow,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.fullmatch(
        r"text \w+ seed 0: (\d\.\d+), ([\d,]+) to ([\d,]+) parameters, \d+ s\n",
        done.stdout,
    )
    assert found is not None, done.stdout
    assert float(found[1]) < 4.5  # guessing among all characters costs 4.6
    assert (found[2] != found[3]) is bool(grow)
