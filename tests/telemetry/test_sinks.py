"""Sinks: the JSONL log, the metrics table, the console."""

from __future__ import annotations

import csv
import io
import logging
import math
from pathlib import Path

import pytest
from rich.console import Console

from esper.telemetry.event import (
    ActionTaken,
    AnomalyDetected,
    ArmPlayed,
    Event,
    GovernorRollback,
    PracticeRound,
    RunResumed,
    StepsNotCaptured,
    record,
)
from esper.telemetry.memory import MEMORY
from esper.telemetry.sinks.console import ConsoleSink
from esper.telemetry.sinks.jsonl import JsonlSink
from esper.telemetry.sinks.metrics_csv import COLUMNS, MetricsCsvSink
from tests.telemetry.sample_events import completed, cut, read_events, started, updated

# --- JSONL


def test_jsonl_reads_back_what_was_written(tmp_path: Path) -> None:
    events: list[Event] = [cut(0), completed(1, mean_return=math.nan), cut(2, slot="two\nlines \u00e9")]
    sink = JsonlSink(tmp_path / "events.jsonl")
    for event in events:
        sink.handle(event)
    sink.close()
    assert list(read_events(tmp_path / "events.jsonl")) == [record(event) for event in events]
    assert len((tmp_path / "events.jsonl").read_bytes().splitlines()) == 3


def test_jsonl_lines_are_on_disk_before_the_next_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    for epoch in range(3):
        sink.handle(cut(epoch))
        assert len(list(read_events(path))) == epoch + 1
    sink.close()


def test_jsonl_appends_to_an_earlier_log(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for epoch in range(2):
        sink = JsonlSink(path)
        sink.handle(cut(epoch))
        sink.close()
    assert [fields["epoch"] for fields in read_events(path)] == [0, 1]


def test_jsonl_cuts_a_torn_line_before_it_appends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    sink.handle(cut(0))
    sink.handle(cut(1))
    sink.close()
    path.write_bytes(path.read_bytes()[:-20])  # the crash
    with caplog.at_level(logging.WARNING):
        sink = JsonlSink(path)
    sink.handle(cut(2))
    sink.close()
    assert [fields["epoch"] for fields in read_events(path)] == [0, 2]
    assert "removed an incomplete last line" in caplog.text


def test_jsonl_writes_nothing_of_an_event_that_json_cannot_hold(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "events.jsonl")
    with pytest.raises(TypeError):
        sink.handle(cut(0, slot=object()))  # type: ignore[arg-type]
    sink.close()
    assert (tmp_path / "events.jsonl").read_bytes() == b""


# --- metrics table


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


def test_metrics_rows_are_on_disk_before_the_next_event(tmp_path: Path) -> None:
    sink = MetricsCsvSink(tmp_path / "metrics.csv")
    for number in range(1, 4):
        sink.handle(completed(number))
        assert len(rows(tmp_path / "metrics.csv")) == number
    sink.close()


def test_metrics_of_a_round_that_is_learned_from_have_empty_cells_for_test_images(tmp_path: Path) -> None:
    sink = MetricsCsvSink(tmp_path / "metrics.csv")
    sink.handle(completed(1, test_accuracy=None, alone_test_accuracy=None))
    sink.close()
    (row,) = rows(tmp_path / "metrics.csv")
    assert (row["test_accuracy"], row["alone_test_accuracy"]) == ("", "")
    assert (row["committed_accuracy"], row["baseline_accuracy"]) == ("81.0", "78.5")


def test_metrics_keep_every_digit(tmp_path: Path) -> None:
    sink = MetricsCsvSink(tmp_path / "metrics.csv")
    sink.handle(completed(1, mean_return=0.1 + 0.2, committed_accuracy=math.nan))
    sink.close()
    (row,) = rows(tmp_path / "metrics.csv")
    assert float(row["mean_return"]) == 0.1 + 0.2
    assert row["committed_accuracy"] == "nan"


def test_metrics_append_without_a_second_header(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    for number in (1, 2):
        sink = MetricsCsvSink(path)
        sink.handle(completed(number))
        sink.close()
    assert [row["round"] for row in rows(path)] == ["1", "2"]


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


def test_metrics_leave_unreported_phases_empty_and_refuse_unknown_ones(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    sink = MetricsCsvSink(path)
    sink.handle(completed(1, phase_seconds={"train": 2.5}))
    with pytest.raises(ValueError, match="unknown phases lunch; known: act, stage, train"):
        sink.handle(completed(2, phase_seconds={"train": 2.5, "lunch": 1.0}))
    sink.close()
    (row,) = rows(path)
    assert row["phase/train"] == "2.5"
    assert row["phase/update"] == ""


def test_metrics_have_a_column_for_each_kind_of_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    sink = MetricsCsvSink(path)
    memory = {"reserved/cuda:0": 100, "reserved/cuda:1": 20, "copies/cuda:0": 3, "copies/pinned": 4, "resident/cpu": 5}
    sink.handle(completed(1, memory=memory))
    with pytest.raises(ValueError, match="unknown kinds of memory lunch; known: allocated, reserved, peak_allocated"):
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


# --- console


def printed(*events: Event, width: int = 40) -> list[str]:
    """The lines of a console that is no terminal, and narrow."""
    stream = io.StringIO()
    sink = ConsoleSink(Console(file=stream, width=width))
    for event in events:
        sink.handle(event)
    sink.close()
    return stream.getvalue().splitlines()


def test_console_header_says_what_runs() -> None:
    text = "\n".join(printed(started()))
    for part in ("digits", "ppo", "seed 7", "12 rounds of 8 hosts, 30 epochs each", "6,418 parameters"):
        assert part in text
    for part in ("r0c0, r0c1", "conv_light, norm", "runs/a"):
        assert part in text


def test_console_has_one_line_a_round() -> None:
    (line,) = printed(completed(1, test_accuracy=85.7))
    assert line.split("  ") == [
        "round 1/10",
        "grown 85.7 %",
        "alone 83.5 %",
        "(+2.2 pp)",
        "1.5 fossils per host",
        "1 rollback",
        "5,230 images/s",
        "ETA 1m30s",  # 9 rounds to come, 10 s each
    ]


def test_console_shows_a_loss_against_the_hosts_left_alone_as_negative() -> None:
    (line,) = printed(completed(2, test_accuracy=80.0))
    assert "(-3.5 pp)" in line
    assert "2 rollbacks" in line


@pytest.mark.parametrize(
    ("seconds", "eta"),
    [(5.0, "45s"), (6.6, "59s"), (6.65, "1m00s"), (10.0, "1m30s"), (400.0, "1h00m"), (1000.0, "2h30m")],
)
def test_console_time_left(seconds: float, eta: str) -> None:
    (line,) = printed(completed(1, seconds=seconds))
    assert line.endswith(f"ETA {eta}")


def test_console_time_left_is_from_the_mean_round() -> None:
    lines = printed(completed(1), completed(2), completed(10))
    assert lines[1].endswith("ETA 2m00s")  # 10 s and 20 s seen, 8 rounds to come at 15 s
    assert lines[2].endswith("ETA 0s")


def test_console_time_left_of_a_resumed_run_counts_its_own_rounds() -> None:
    (line,) = printed(completed(8, seconds=30.0))
    assert line.endswith("ETA 1m00s")  # 2 rounds to come


def test_console_tells_of_rollbacks_and_cut_seeds() -> None:
    back = GovernorRollback(
        env=3, episode=11, epoch=17, reason="loss spike", value=math.nan, threshold=4.25, restored_epoch=12, rollbacks=1
    )
    lines = printed(back, cut(5))
    assert lines == [
        "rollback: round 12, host 3, epoch 17: loss spike (not a number, limit 4.2500), back to epoch 12",
        "seed cut: round 1, host 1, epoch 5: conv_light in r0c1 became non-finite",
    ]


def test_console_is_silent_on_other_events() -> None:
    action = ActionTaken(
        env=0, episode=0, epoch=0, op="GERMINATE", slot="r0c0", blueprint="norm", accepted=True, reason=""
    )
    assert printed(action) == []


def test_console_prints_brackets_as_they_are_and_ascii_only() -> None:
    lines = printed(started(folder="runs/[red]x"), completed(1), cut(0))
    assert any("runs/[red]x" in line for line in lines)
    assert all(line.isascii() for line in lines)


def test_console_compares_a_round_that_is_learned_from_with_the_baseline() -> None:
    (line,) = printed(completed(1, test_accuracy=None, alone_test_accuracy=None))
    assert line.split("  ")[1:4] == ["grown 81.0 %", "baseline 78.5 %", "(+2.5 pp)"]


def test_console_counts_epochs_where_there_are_no_images() -> None:
    (line,) = printed(completed(1, samples=0))
    assert "  42 epochs/s  " in line


def test_console_tells_what_was_learned_and_compared_and_that_a_run_was_resumed() -> None:
    lines = printed(RunResumed(3, 10, 8, 30, None, None, 0.0), updated(), ArmPlayed("heuristic", 1, 2, 83.25))
    assert lines == [
        "resumed after round 3/10",
        "  learned: KL 0.012  clipped 8%  entropy 2.50  explained variance -0.50  12,800 env steps",
        "comparing, round 1/2: heuristic 83.2 %",
    ]


def test_console_tells_what_cublas_has_for_each_lane() -> None:
    size = "up to 8.125 MiB a lane (CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8, set by Esper)"
    assert f"cuBLAS workspaces: {size}" in printed(started(cublas_workspace=size))
    resumed = RunResumed(3, 10, 8, 30, None, None, 0.0, cublas_workspace=size)
    assert f"cuBLAS workspaces: {size}" in printed(resumed)
    assert not any("cuBLAS" in line for line in printed(started()))


@pytest.mark.finding("H2")
def test_console_tells_the_tier_and_why_not_another() -> None:
    assert "steps: graph, bfloat16" in printed(started())
    why = printed(started(tier="eager", tier_refused="it [has] bugs"), StepsNotCaptured("dropout"))
    assert "steps: eager, bfloat16; the configured tier cannot be used: it [has] bugs" in why
    assert why[-1] == "steps not captured: dropout"
    assert not any(line.startswith("steps") for line in printed(started(tier=None)))
    again = RunResumed(3, 10, 8, 30, tier="compiled", tier_refused=None, time=0.0)
    assert printed(again) == ["resumed after round 3/10", "steps: compiled"]
    within = RunResumed(3, 10, 8, 30, None, None, 0.0, ("a/checkpoint.pt is not a checkpoint",), epochs=5)
    assert printed(within)[:2] == [
        "resumed after round 3/10, 5 epochs into the next round",
        "  warning: a/checkpoint.pt is not a checkpoint",
    ]


def test_console_tells_which_copies_are_in_pinned_memory() -> None:
    (line,) = set(printed(started(pinned_copies=("older snapshots", "newest snapshots")))) - set(printed(started()))
    assert line == "copies of hosts in pinned memory: older snapshots, newest snapshots"


@pytest.mark.finding("L4")
def test_console_tells_that_batches_are_computed_in_parts() -> None:
    assert not any("micro-batches" in line for line in printed(started()))
    assert any("into 4 micro-batches; BatchNorm" in line for line in printed(started(micro_batches=4)))


def test_console_tells_of_practice_in_a_few_lines() -> None:
    lines = printed(*(PracticeRound(number, 20, 0.5) for number in range(1, 21)))
    assert lines[-1] == "practice on simulated hosts, round 20/20: return +0.500"
    assert 2 <= len(lines) <= 5


def test_console_warns_of_an_agent_that_learns_badly() -> None:
    warning = AnomalyDetected(4, "value_wrong", None, -3.0, -1.0, "the critic is off", "lower ppo.learning_rate")
    assert printed(warning) == ["  warning, round 4: the critic is off; try: lower ppo.learning_rate"]
