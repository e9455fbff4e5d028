"""Plots of a comparison: files in every format, and the lines of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from esper.compare.plots import draw_differences, draw_pairs, short
from tests.compare.outcomes import outcome, printed

LONG = "checkpoint:runs/a/long/way/down/to/the/folder"


def dark(file: Path) -> float:
    """Share of a picture that is not white."""
    return float((np.asarray(Image.open(file).convert("L")) < 250).mean())


@pytest.mark.slow
def test_plots_are_written_and_are_not_blank(tmp_path: Path) -> None:
    text = printed(
        outcome(tmp_path, {"base": 0.0, "good": 2.0, LONG: -1.0}), plots=True
    )
    for name in ("pairs.png", "differences.png", "cost.png"):
        assert 0.01 < dark(tmp_path / name) < 0.5
        assert name in text
        assert (tmp_path / name).with_suffix(".svg").read_text().startswith("<?xml")
        assert (tmp_path / name).with_suffix(".pdf").read_bytes().startswith(b"%PDF")


def test_the_plot_of_pairs_shows_every_pair_and_arm(tmp_path: Path) -> None:
    found = outcome(tmp_path, {"base": 0.0, "good": 2.0, LONG: -1.0})
    (axes,) = draw_pairs(found).axes
    pairs = [
        line.get_ydata()
        for line in axes.lines
        if len(_data(line.get_ydata())) == 3 and line.get_linestyle() == "-"
    ]
    assert [list(_data(pair)) for pair in pairs] == [
        [found.hosts[name][i].accuracy for name in found.hosts] for i in range(10)
    ]
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "base",
        "good",
        short(LONG),
    ]
    assert axes.get_ylabel() == "test accuracy, %"


def test_metrics_in_which_all_hosts_are_equal_have_no_panel_of_differences(
    tmp_path: Path,
) -> None:
    found = outcome(tmp_path, {"base": 0.0, "good": 2.0})
    equal = {
        result.metric.title
        for result in found.metrics
        if result.metric.common(found.hosts) is not None
    }
    titles = [
        axes.get_title() for axes in draw_differences(found).axes if axes.get_visible()
    ]
    assert "Rollbacks" in equal
    assert titles == [
        r.metric.label
        for r in found.metrics
        if r.missing is None and r.metric.judged and r.metric.title not in equal
    ]
    alike = outcome(tmp_path / "alike", {"base": 0.0, "same": 0.0})
    assert (
        next(
            axes.get_title()
            for axes in draw_differences(alike).axes
            if axes.get_visible()
        )
        == "Test accuracy, %"
    )


def _data(values: object) -> Sequence[float]:
    return np.asarray(values, dtype=np.float64)  # type: ignore[return-value]
