"""Cases in one session: which are measured, and that both sides of each run."""

from __future__ import annotations

import sys
from contextlib import closing
from importlib import import_module

import pytest
import torch
from rich.console import Console

from esper.bench import CASES
from esper.bench.case import BenchArgs
from esper.bench.runner import measure
from esper.bench.session import measure_all
from tests.selection import slow_except


@pytest.mark.parametrize("case", slow_except(["validate", "env-step"], ["validate", "env-step", "telemetry-overhead"]))
def test_both_sides_of_a_case_run(case: str) -> None:
    with closing(import_module(CASES[case]).comparisons(BenchArgs(quick=True))) as comparisons:
        result = measure(next(comparisons), rounds=1)
    assert result.value > 0
    assert result.baseline_value > 0
    assert torch.device(result.device) == torch.device("cpu")


def test_an_unnamed_case_without_its_baseline_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sb3_contrib", None)
    console = Console(record=True, width=200)
    modules = {"ppo-update": import_module(CASES["ppo-update"])}
    args = BenchArgs(((2, 3),), rounds=1)
    assert measure_all(modules, args, False, console, lambda results: None) == []
    assert "ppo-update was skipped: the baseline is sb3-contrib" in console.export_text()
