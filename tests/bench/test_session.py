"""Cases in one session: which are measured, and that both sides of each run."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from rich.console import Console

from esper.bench import CASES
from esper.bench.case import BenchArgs
from esper.bench.runner import measure
from esper.bench.session import estimate, measure_all
from esper.telemetry.text import duration
from tests.selection import slow_except


@pytest.mark.parametrize(
    "case",
    slow_except(
        ["validate", "env-step"], ["validate", "env-step", "telemetry-overhead"]
    ),
)
def test_both_sides_of_a_case_run(case: str) -> None:
    with closing(
        import_module(CASES[case]).comparisons(BenchArgs(quick=True))
    ) as comparisons:
        result = measure(next(comparisons), rounds=1)
    assert result.value > 0
    assert result.baseline_value > 0
    assert torch.device(result.device) == torch.device("cpu")


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_case_says_how_long_its_sizes_take(case: str) -> None:
    assert import_module(CASES[case]).SIZES.seconds > 0


def test_the_time_of_all_cases_is_estimated_from_their_sizes_and_turns() -> None:
    modules = {case: import_module(CASES[case]) for case in ("sgd", "train-epoch")}
    epoch = modules["train-epoch"].SIZES
    args = BenchArgs(((4, 128, 8),) * 3)
    only = {"train-epoch": modules["train-epoch"]}
    assert f"train-epoch {duration(3 * epoch.seconds)}" in estimate(only, args)
    assert f"train-epoch {duration(epoch.seconds)}" in estimate(
        only, replace(args, rounds=5)
    )
    whole = estimate(modules, BenchArgs())
    assert whole.startswith("About ")
    assert whole.index("train-epoch") < whole.index("sgd"), "the longest comes first"
    assert estimate(modules, BenchArgs(quick=True)) == ""


def test_an_unnamed_case_without_its_baseline_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sb3_contrib", None)
    console = Console(record=True, width=200)
    modules = {"ppo-update": import_module(CASES["ppo-update"])}
    args = BenchArgs(((2, 3),), rounds=1)
    assert measure_all(modules, args, False, console, lambda results: None) == []
    assert (
        "ppo-update was skipped: the baseline is sb3-contrib" in console.export_text()
    )
