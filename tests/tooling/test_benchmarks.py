"""Scripts in benchmarks/: their imports exist, and those that read results give the right figures."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import benchmarks.adapters  # noqa: F401  registers controls, once for all tests
from esper.compare import controls
from esper.compare.runner import HostResult
from esper.config import ConfigError
from esper.files import checkpoint

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


@pytest.mark.slow
def test_the_cost_of_a_grower_is_measured_with_and_without_seeds() -> None:
    command = [sys.executable, "-m", "benchmarks.grower_cost", "--turns", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=FOLDER.parent
    )
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines()[2:]]
    assert rows == ["0", "1 incubating", "3 incubating", "1 blended", "3 blended"]


def hosts(*accuracies: float) -> list[dict[str, Any]]:
    host = HostResult(0.0, 0.0, 300.0, 277.0, 0.0, 30.0, 0.0, 1.0)
    return [replace(host, accuracy=accuracy).plain() for accuracy in accuracies]


def test_runs_of_several_seeds_are_pooled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def state(gain: float) -> dict[str, Any]:
        arms = {
            "ppo": (90 + gain, 91 + gain),
            "none": (90, 91),
            "plans": (91, 92),
            "schedule": (92, 93),
        }
        return {
            "agent": {
                "compared": {
                    name: {"0": hosts(*accuracies)} for name, accuracies in arms.items()
                }
            }
        }

    states = {"a": state(1.5), "b": state(3.5)}
    monkeypatch.setattr(checkpoint, "read", lambda folder: states[folder.name])
    script = runpy.run_path(str(FOLDER / "pool_runs.py"), run_name="imported")
    script["pool"]({name: script["hosts_of"](Path(name)) for name in states})
    out = capsys.readouterr().out
    assert "| a | +1.50 [" in out
    assert "| 0.75 | 1.0 | 300 | 300 |" in out  # 1.5 of the 2 of `schedule`
    assert "| `ppo` | 93.00 | 300 |  |\n| `none` | 90.50 | 300 | +2.50 [" in out
    states["b"]["agent"]["compared"]["none"] = {}
    with pytest.raises(ConfigError, match="b has no comparison yet"):
        script["hosts_of"](Path("b"))
