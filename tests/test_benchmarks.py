"""The scripts in benchmarks/ start: what they import exists. Those that read results give the right figures."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from esper.config import ConfigError
from esper.evaluation.runner import HostResult
from esper.files import checkpoint

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if not path.name.startswith("test_"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_imports_what_exists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))  # as `python SCRIPT` does
    assert runpy.run_path(str(FOLDER / name), run_name="imported")["__doc__"]


def test_runs_of_several_seeds_are_pooled(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def state(gains: tuple[float, float]) -> dict[str, Any]:
        def hosts(*accuracies: float) -> dict[str, Any]:
            host = HostResult(0.0, 0.0, 300.0, 277.0, 0.0, 30.0, 0.0, 1.0)
            return {"0": [replace(host, accuracy=accuracy).plain() for accuracy in accuracies]}

        return {"agent": {"compared": {"ppo": hosts(90 + gains[0], 91 + gains[1]), "none": hosts(90, 91)}}}

    states = {"a": state((1.0, 2.0)), "b": state((3.0, 4.0))}
    monkeypatch.setattr(checkpoint, "read", lambda folder: states[folder.name])
    pool = runpy.run_path(str(FOLDER / "pool_runs.py"), run_name="imported")["pool"]
    pool([Path("a"), Path("b")])
    out = capsys.readouterr().out
    assert "| a | +1.50 [" in out
    assert "| `ppo` | 93.00 | 300 |  |\n| `none` | 90.50 | 300 | +2.50 [" in out
    states["b"]["agent"]["compared"]["none"] = {}
    with pytest.raises(ConfigError, match="b has no comparison yet"):
        pool([Path("a"), Path("b")])


def test_the_model_of_ranks_adds_up_what_an_epoch_waits_for() -> None:
    model = runpy.run_path(str(FOLDER / "rank_model.py"), run_name="imported")
    costs = model["Costs"](host=0.1, own=0.001, message=0.002, kilobytes=5.0, megabytes_per_second=100.0)
    assert costs.epoch(8, 1, 2) == pytest.approx(8 * 0.1 + 8 * 0.001)
    exchange = 0.002 * 3 + 6 * 5e-5
    assert costs.epoch(8, 4, 4) == pytest.approx(2 * 0.1 + 8 * 0.001 + exchange)
    assert costs.epoch(8, 4, 2) == pytest.approx(2 * 0.1 * 2 + 8 * 0.001 + exchange)  # two ranks on each core
    assert costs.epoch(8, 4, 1, machines=4) == pytest.approx(2 * 0.1 + 8 * 0.001 + 0.002 * 3 + 2e-4 + 6 * 5e-6)
    most = costs.most_ranks(4, 1)
    assert costs.added(4 * most, most) <= 0.05 * 0.4 < costs.added(4 * (most + 1), most + 1)
    page = model["markdown"](costs, {1: 0.8, 2: 0.45}, 8, 2)
    assert "| 2 | 0.45 | 0.41 |" in page
    assert any(line.startswith("| 16 machines | 10.00 |") for line in page)
