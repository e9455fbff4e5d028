"""The script that checks everything on a GPU says, where there is none, what it left out."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from esper.bench.main import CASES

ROOT = Path(__file__).resolve().parents[1]
STEPS = ["build", "tests", "bench", "epochs", "rounds", "run", "racecheck", "memcheck"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the script would use it")
def test_without_a_gpu_every_step_is_skipped_with_the_reason(tmp_path: Path) -> None:
    found = subprocess.run(
        ["bash", ROOT / "benchmarks" / "gpu_check.sh", tmp_path / "out"], capture_output=True, text=True, cwd=tmp_path
    )
    assert found.returncode == 0, found.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [step["step"] for step in summary["steps"]] == STEPS
    assert {(step["status"], step["says"]) for step in summary["steps"]} == {("skipped", "no GPU that torch can use")}
    assert "torch" in summary["machine"][0]
    assert "| memcheck | skipped | 0 | no GPU that torch can use |" in (tmp_path / "out" / "summary.md").read_text()


def test_what_is_measured_are_cases_that_there_are() -> None:
    script = (ROOT / "benchmarks" / "gpu_check.sh").read_text()
    named = re.findall(r"^    measure \w+ \d+ ([a-z -]+[a-z])", script, flags=re.M)
    assert len(named) == 3
    assert set(" ".join(named).split()) <= {*CASES, "--size"}


def test_it_is_over_in_ten_minutes(tmp_path: Path) -> None:
    script = (ROOT / "benchmarks" / "gpu_check.sh").read_text()
    match = re.search(r"^budget=(\d+) ", script, flags=re.M)
    assert match is not None
    assert int(match[1]) < 600
    # The function that all steps go through, in a shell of its own, with a budget that is nearly spent.
    functions = script[script.index("note() {") : script.index("reason=$(")]
    shell = (
        f"folder={tmp_path}; failed=0; budget=6\n{functions}\nstep first 60 sleep 30; step second 60 true; exit $failed"
    )
    found = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=20)
    assert found.returncode == 1
    assert [line.split()[:2] for line in found.stdout.splitlines()] == [["first", "failed"], ["second", "failed"]]
    assert "not done after 6 s" in found.stdout
    assert "no time left of 6 s" in found.stdout
