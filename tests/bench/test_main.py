"""`esper-bench` as typed in a terminal. No time is asserted."""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from esper.bench import CASES, runner
from esper.bench.main import main
from esper.bench.tuned import TunedTraining

FIELDS = {
    "case",
    "size",
    "device",
    "baseline",
    "ratio",
    "ratio_low",
    "ratio_high",
    "bar",
    "unit",
    "value",
}


def type_in(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(main, words)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.exit_code, found.output


def test_there_is_a_case_for_each_operator_and_each_part_of_a_run() -> None:
    operators = {
        "grad-stats",
        "cross-entropy",
        "stage-batch",
        "sgd",
        "adamw",
        "norm-relu-pool",
    }
    runs = {
        "train-epoch",
        "validate",
        "env-step",
        "ppo-update",
        "end-to-end",
        "telemetry-overhead",
        "train-task",
    }
    assert set(CASES) == operators | runs


def test_results_are_written_as_json_markdown_and_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is compiled, and no process started.
    monkeypatch.setattr(
        "esper.bench.train_epoch.TunedTraining", partial(TunedTraining, compiles=False)
    )
    for module in ("tuned", "train_epoch"):
        monkeypatch.setattr(f"esper.bench.{module}.usable_cores", lambda: 1)
    files = [str(tmp_path / name) for name in ("b.json", "b.md", "t.json")]
    options = [
        "--rounds",
        "1",
        "--quick",
        "--device",
        "cpu",
        "--json",
        files[0],
        "--markdown",
        files[1],
    ]
    code, output = type_in(
        "train-epoch", "--size", "2x4x2", *options, "--profile", files[2]
    )
    assert code == 0, output
    assert "2 measured; 0 of 0 bars met" in output
    row, plain = json.loads(Path(files[0]).read_text())
    assert row.keys() >= FIELDS
    assert (row["case"], row["device"], row["unit"], row["bar"]) == (
        "train-epoch",
        "cpu",
        "images/s",
        None,
    )
    assert row["baseline"].startswith("tuned PyTorch: ")
    assert plain["baseline"].startswith("plain eager PyTorch")
    assert row["value"] > 0
    assert "| train-epoch |" in Path(files[1]).read_text()
    events = json.loads(Path(files[2]).read_text())["traceEvents"]
    spans = [event for event in events if event.get("name") == "train-epoch"]
    convolutions = [event for event in events if event.get("name") == "aten::conv2d"]
    assert spans
    assert {event["tid"] for event in convolutions} - {spans[0]["tid"]}, (
        "other threads are traced too"
    )


def test_an_interrupt_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = runner.measure
    measured: list[runner.Result] = []

    def interrupted(*arguments: Any, **options: Any) -> runner.Result:
        if measured:
            raise KeyboardInterrupt
        measured.append(measure(*arguments, **options))
        return measured[0]

    monkeypatch.setattr(runner, "measure", interrupted)
    files = [str(tmp_path / name) for name in ("b.json", "b.md")]
    options = [
        "--rounds",
        "1",
        "--quick",
        "--device",
        "cpu",
        "--json",
        files[0],
        "--markdown",
        files[1],
    ]
    code, _ = type_in("sgd", *options)
    assert code == 1
    assert [row["case"] for row in json.loads(Path(files[0]).read_text())] == [
        measured[0].case
    ]
    assert f"| {measured[0].case} |" in Path(files[1]).read_text()


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_wrong_size_is_refused_with_the_form_of_the_cases_sizes(case: str) -> None:
    sizes = import_module(CASES[case]).SIZES
    example = "x".join(str(number) for number in sizes.default[0])
    code, output = type_in(case, "--size", "1x2x3x4x5")
    assert code == 1
    assert (
        f"{case} takes --size {sizes.form}, for example {example}, not 1x2x3x4x5"
        in output
    )
    for own in (*sizes.default, *sizes.cuda, *sizes.quick):
        assert len(own) == len(sizes.form.split("x"))


def test_a_size_without_a_case_is_refused() -> None:
    code, output = type_in("--size", "4x128x8")
    assert code == 1
    assert (
        "requires the names of cases; known: adamw, cross-entropy, end-to-end" in output
    )


@pytest.mark.parametrize("option", ["--json", "--markdown", "--profile"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    option: str, tmp_path: Path
) -> None:
    code, output = type_in(
        "grad-stats", "--quick", option, str(tmp_path / "gone" / "file")
    )
    assert code == 1
    assert "give a file in an existing folder that you can write to" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused() -> None:
    code, output = type_in("sgd", "--device", "cuda")
    assert code == 1
    assert "'cuda' is not available; this machine has: cpu" in output


def test_a_named_case_needs_its_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sb3_contrib", None)
    code, output = type_in(
        "ppo-update", "--size", "2x3", "--rounds", "1", "--device", "cpu"
    )
    assert code == 1
    assert 'pip install -e ".[test]"' in output
