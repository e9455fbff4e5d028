"""The script that checks everything on a GPU says, where there is none, what it left out."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the script would use it")
def test_without_a_gpu_every_step_is_skipped_with_the_reason(tmp_path: Path) -> None:
    found = subprocess.run(
        ["bash", ROOT / "benchmarks" / "gpu_check.sh", tmp_path / "out"], capture_output=True, text=True, cwd=tmp_path
    )
    assert found.returncode == 0, found.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [step["step"] for step in summary["steps"]] == ["build", "tests", "racecheck", "memcheck", "bench", "run"]
    assert {(step["status"], step["says"]) for step in summary["steps"]} == {("skipped", "no GPU that torch can use")}
    assert "torch" in summary["machine"][0]
    assert "| memcheck | skipped | 0 | no GPU that torch can use |" in (tmp_path / "out" / "summary.md").read_text()
