"""The report of a comparison: tables, notes, plots."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from esper.compare.analysis import METRICS, analyse
from esper.compare.table import print_report, smallest_p
from esper.show.console import TerminalConsole
from tests.compare.outcomes import host, outcome, printed

LONG = "checkpoint:runs/a/long/way/down/to/the/folder"


@pytest.mark.parametrize("width", [20, 40, 80])
def test_no_figure_is_cut_however_narrow_the_terminal(
    tmp_path: Path, width: int
) -> None:
    text = io.StringIO()
    print_report(
        outcome(tmp_path, {"base": 0.0, "good": 2.0}), Console(file=text, width=width)
    )
    shown = text.getvalue()
    assert "…" not in shown
    for value in ("+2.00..+2.00", "0.002", "10/0/0", "better"):
        assert value in shown
    assert max(map(len, shown.splitlines())) <= width
    assert ("difference: +2.00" in shown) == (width < 80)


def row(text: str, name: str, table: int) -> list[str]:
    """Cells of an arm in one of the tables that come first."""
    return [line.split() for line in text.splitlines() if line.startswith(f"{name} ")][
        table
    ]


def test_verdicts_follow_the_direction_of_each_metric(tmp_path: Path) -> None:
    text = printed(
        outcome(tmp_path, {"base": 0.0, "good": 2.0, "bad": -1.0, "same": 0.0})
    )
    assert row(text, "good", 1) == ["good", "+2.00", "+2.00..+2.00", "0.0059", "better"]
    assert row(text, "bad", 1)[-1] == "worse"
    assert row(text, "same", 1)[-2:] == ["no", "evidence"]
    assert row(text, "base", 1)[-1] == "reference"
    _, loss = text.split("Final validation loss (lower is better)")
    assert row(loss, "good", 0)[-1] == "better"  # its loss is lower
    _, price = text.split(
        "Parameters added to the task's host (neither direction is better)"
    )
    assert row(price, "good", 0)[-1] == "more"
    assert row(price, "bad", 0)[-1] == "less"
    assert "good against base: good is better by 2.00 (95% interval" in text
    assert "bad against base: base is better by 1.00 (95% interval" in text
    assert "same against base: no evidence of a difference" in text
    full = (tmp_path / "table.txt").read_text()
    assert (
        "good against base: good is better by 0.0200 (95% interval" in full
    )  # its loss is lower
    assert (
        "bad against base: base is higher by 10 (95% interval" in full
    )  # in parameters, which are a cost
    assert "Rollbacks: 0.00 for every host" in text


def test_the_name_of_a_rule_is_in_one_piece(tmp_path: Path) -> None:
    name = "PlantsOneAfterTheOtherAndKeepsIt"
    text = printed(outcome(tmp_path, {"base": 0.0, name: 2.0}, metrics=METRICS[:1]))
    lines = text.splitlines()
    assert sum(line.startswith(name) for line in lines) >= 3
    assert not any(
        line.strip() and line.strip() in name for line in lines if line != name
    )


def test_numbers_that_do_not_exist_are_dashes(tmp_path: Path) -> None:
    """Of arms whose hosts are all the same, and that are said to be."""
    hosts = {"none": [host(64.6, 0)] * 12, "grown": [host(77.1, 0)] * 12}
    copies = outcome(tmp_path, {"none": 0.0, "grown": 1.0}, metrics=METRICS[:1])
    copies = replace(
        copies,
        requested_pairs=12,
        hosts=hosts,
        metrics=analyse(hosts, "none", METRICS[:1], alike=True),
    )
    text = printed(copies)
    assert row(text, "grown", 0) == ["grown", "77.10", "0.00", "-", "77.10", "-"]
    assert row(text, "grown", 1) == ["grown", "+12.50", "-", "no", "verdict"]
    assert row(text, "grown", 2)[1:] == ["12/0/0", "-", "-", "-"]
    assert "none, grown: all hosts have the same result." in " ".join(text.split())


def test_the_report_says_that_nine_pairs_are_inconclusive(tmp_path: Path) -> None:
    text = printed(outcome(tmp_path, {"base": 0.0, "good": 5.0}, pairs=9))
    assert row(text, "good", 1)[-1] == "inconclusive"
    assert "Fewer than 10 pairs are always inconclusive" in text
    assert "is better by" not in text


def test_the_report_says_if_there_are_too_few_pairs_for_the_arms(
    tmp_path: Path,
) -> None:
    assert smallest_p(10, 25) < 0.05 < smallest_p(10, 26)
    text = printed(
        outcome(
            tmp_path,
            {"base": 0.0, **{f"arm{i}": 3.0 for i in range(26)}},
            metrics=METRICS[:1],
        )
    )
    assert "10 pairs cannot show a difference in 26 comparisons at once" in text
    assert row(text, "arm0", 1)[-2:] == ["no", "evidence"]


def test_a_comparison_that_was_cut_short_says_so(tmp_path: Path) -> None:
    text = " ".join(
        printed(
            outcome(tmp_path, {"base": 0.0, "good": 2.0}, pairs=10, asked=40)
        ).split()
    )
    assert "10 of 40 requested pairs" in text
    assert (
        "Only 10 of 40 pairs are complete. To continue: esper compare --resume" in text
    )


@pytest.mark.parametrize("pairs", [1, 10])
def test_no_line_is_wider_than_80_columns(pairs: int, tmp_path: Path) -> None:
    found = outcome(tmp_path, {"base": 0.0, LONG: 2.0, "[red]same": 0.0}, pairs)
    text = printed(found)
    *lines, last = text.splitlines()
    assert last.startswith("Written to ")  # a path, which is not broken
    assert max(map(len, lines)) <= 80
    assert "nan" not in text
    assert "inf" not in text
    assert "[red]same" in text
    assert "verdict" in text
    assert (tmp_path / "table.txt").read_text().count(
        "Mann-Whitney U"
    ) >= 3  # all judged metrics in full


def test_a_plot_that_fails_costs_only_the_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("no font")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fails)
    text = printed(outcome(tmp_path, {"base": 0.0, "good": 2.0}), plots=True)
    assert "Plots are missing: ValueError: no font." in " ".join(text.split())
    assert (tmp_path / "table.tex").exists()


def test_without_matplotlib_the_report_says_that_there_are_no_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = printed(outcome(tmp_path, {"base": 0.0, "good": 2.0}), plots=True)
    assert "No plots: matplotlib cannot be imported" in text
    assert (tmp_path / "table.txt").exists()
    assert not list(tmp_path.glob("*.png"))


def test_names_with_colons_are_no_emoji(tmp_path: Path) -> None:
    """In the terminal and in the file, in tables and in notes."""
    found = outcome(tmp_path, {"base": 0.0, "checkpoint:v": 2.0})
    for text in (printed(found), (tmp_path / "table.txt").read_text()):
        assert "checkpoint:v against base: checkpoint:v is better" in text
    told = io.StringIO()
    console = TerminalConsole(file=told, width=100)
    console.print("checkpoint:v: trained once")
    assert told.getvalue() == "checkpoint:v: trained once\n"
