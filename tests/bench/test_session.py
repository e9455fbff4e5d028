"""Cases in one session: which are measured, and that both sides of each run."""

from __future__ import annotations

import sys
from contextlib import closing

import pytest
import torch
from rich.console import Console

from esper.bench import CASES
from esper.bench.case import BenchArgs, load_case
from esper.bench.runner import measure
from esper.bench.session import measured
from tests.selection import slow_except


@pytest.mark.parametrize("case", slow_except(["sgd"], sorted(CASES)))
def test_both_sides_of_a_case_run(case: str) -> None:
    args = BenchArgs(quick=True)
    with closing(load_case(case).comparisons(args)) as comparisons:  # type: ignore[type-var]
        result = measure(next(comparisons), rounds=1)
    assert result.value > 0
    assert result.baseline_value > 0
    assert torch.device(result.device) == torch.device("cpu")


def test_an_unnamed_case_without_its_baseline_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    console = Console(record=True, width=200)
    cases = {"stage-batch": load_case("stage-batch")}
    args = BenchArgs(((2, 3),), rounds=1)
    assert list(measured(cases, args, False, console)) == []
    assert "stage-batch was skipped: " in console.export_text()
