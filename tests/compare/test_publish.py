"""Tables for papers have the numbers of the analysis, whatever arms are called."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest

from esper.compare.publish import CSV, LATEX, csv_table, latex, latex_table, save_tables
from tests.compare.test_table import outcome


def test_the_csv_has_every_metric_of_every_arm_unrounded(tmp_path: Path) -> None:
    found = outcome(tmp_path, {"base": 0.0, "good_1,x": 2.0})
    rows = list(csv.DictReader(io.StringIO(csv_table(found))))
    measured = [metric for metric in found.metrics if not metric.missing]
    assert [(row["metric"], row["arm"]) for row in rows] == [
        (metric.metric.name, name)
        for metric in measured
        for name in ("base", "good_1,x")
    ]
    assert float(rows[1]["mean"]) == measured[0].arms["good_1,x"].mean
    assert (
        float(rows[1]["difference"])
        == measured[0].comparisons["good_1,x"].pair.difference
    )
    assert (rows[0]["difference"], rows[0]["verdict"], rows[1]["verdict"]) == (
        "",
        "",
        "better",
    )


def test_the_latex_table_has_a_row_per_arm_and_the_same_number_of_cells_in_each(
    tmp_path: Path,
) -> None:
    text = latex_table(outcome(tmp_path, {"base": 0.0, "a_b&c": 2.0}))
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert [row.replace(r"\&", "").count("&") for row in rows] == [4, 4, 4]
    assert rows[2].startswith(r"a\_b\&c & ")
    assert rows[2].endswith(r"better \\")


def test_a_p_value_is_never_printed_as_zero(tmp_path: Path) -> None:
    found = outcome(tmp_path, {"base": 0.0, "clear": 2.0})
    comparisons = found.metrics[0].comparisons
    comparisons["clear"] = replace(comparisons["clear"], adjusted_p=0.0)
    assert "& $<$ 0.0001 &" in latex_table(found)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [("50 %", r"50 \%"), ("a\\b", r"a\textbackslash{}b"), ("plain", "plain")],
)
def test_latex_escapes_what_it_would_interpret(text: str, escaped: str) -> None:
    assert latex(text) == escaped


def test_both_tables_are_saved(tmp_path: Path) -> None:
    assert [
        path.name
        for path in save_tables(outcome(tmp_path, {"base": 0.0, "b": 1.0}), tmp_path)
    ] == [CSV, LATEX]
    assert (tmp_path / CSV).read_text().startswith("metric,unit,arm,")
    assert (tmp_path / LATEX).read_text().startswith("% 10 pairs")
