"""The summary of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper.compare.analysis import corrected
from esper.compare.statistics import compare_pairs
from esper.run.telemetry import RunSummary


def summary(*names: str) -> RunSummary:
    pairs = [
        compare_pairs([2.0, 3.0], [1.0, 1.0], name_a="ppo", name_b=name)
        for name in names
    ]
    return RunSummary(
        Path("r"), "ppo", tuple(corrected(pairs)), 277, 300.0, 1.0, 1, 2, True, 3.0, {}
    )


def test_the_comparison_is_that_with_the_first_baseline() -> None:
    assert summary("none", "random").comparison.name_b == "none"


def test_a_run_without_a_comparison_has_none_to_return() -> None:
    with pytest.raises(ValueError, match="nothing was compared"):
        _ = summary().comparison
