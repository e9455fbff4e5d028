"""The metrics table: a row per round, with every digit."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from esper.telemetry.memory import MEMORY
from esper.telemetry.sinks.metrics_csv import COLUMNS, MetricsCsvSink
from tests.telemetry.sample_events import completed, cut


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_metrics_have_one_row_a_round(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    sink = MetricsCsvSink(path)
    for event in (cut(0), completed(1), cut(1), completed(2)):
        sink.handle(event)
    sink.close()
    table = rows(path)
    assert list(table[0]) == list(COLUMNS)
    assert [row["round"] for row in table] == ["1", "2"]
    assert [row["samples"] for row in table] == ["1000", "2000"]
    assert [row["phase/act"] for row in table] == ["1.0", "2.0"]
    assert [row["phase/telemetry"] for row in table] == ["1.7", "2.7"]
    assert not {"phase_seconds", "event", "schema"} & set(COLUMNS)


def test_metrics_keep_every_digit(tmp_path: Path) -> None:
    sink = MetricsCsvSink(tmp_path / "metrics.csv")
    sink.handle(completed(1, mean_return=0.1 + 0.2, committed_accuracy=math.nan))
    sink.close()
    (row,) = rows(tmp_path / "metrics.csv")
    assert float(row["mean_return"]) == 0.1 + 0.2
    assert row["committed_accuracy"] == "nan"


def test_a_baseline_that_was_not_measured_is_empty(tmp_path: Path) -> None:
    sink = MetricsCsvSink(tmp_path / "metrics.csv")
    sink.handle(completed(1, baseline_accuracy=math.nan))
    sink.close()
    (row,) = rows(tmp_path / "metrics.csv")
    assert row["baseline_accuracy"] == ""


def test_metrics_cut_a_torn_row_before_they_append(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    sink = MetricsCsvSink(path)
    sink.handle(completed(1))
    sink.handle(completed(2))
    sink.close()
    path.write_bytes(path.read_bytes()[:-5])
    sink = MetricsCsvSink(path)
    sink.handle(completed(3))
    sink.close()
    assert [row["round"] for row in rows(path)] == ["1", "3"]


def test_metrics_refuse_a_table_with_other_columns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("round,loss\n1,0.5\n")
    with pytest.raises(ValueError, match=r"metrics\.csv has different columns"):
        MetricsCsvSink(path)
    assert path.read_text() == "round,loss\n1,0.5\n"


def test_metrics_leave_unreported_phases_empty_and_refuse_unknown_ones(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.csv"
    sink = MetricsCsvSink(path)
    sink.handle(completed(1, phase_seconds={"train": 2.5}))
    with pytest.raises(
        ValueError, match=r"unknown columns phase/lunch; known: round, .*phase/act, "
    ):
        sink.handle(completed(2, phase_seconds={"train": 2.5, "lunch": 1.0}))
    sink.close()
    (row,) = rows(path)
    assert row["phase/train"] == "2.5"
    assert row["phase/update"] == ""


def test_metrics_have_a_column_for_each_kind_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    sink = MetricsCsvSink(path)
    memory = {
        "reserved/cuda:0": 100,
        "reserved/cuda:1": 20,
        "copies/cuda:0": 3,
        "copies/pinned": 4,
        "resident/cpu": 5,
    }
    sink.handle(completed(1, memory=memory))
    with pytest.raises(
        ValueError,
        match=r"unknown columns memory/lunch; known: round, .*memory/copies, ",
    ):
        sink.handle(completed(2, memory={"lunch/cpu": 1}))
    sink.close()
    (row,) = rows(path)
    assert {name: row[f"memory/{name}"] for name in MEMORY} == {
        "allocated": "",
        "reserved": "120",
        "peak_allocated": "",
        "peak_reserved": "",
        "copies": "7",
        "copies_per_host": "",
        "resident": "5",
    }
