"""`esper-bench` as typed in a terminal. No time is asserted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from esper.bench import CASES, runner
from esper.bench.case import load_case, size_text
from esper.bench.command import command

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
    "value_low",
    "value_high",
    "baseline_value",
    "turns",
    "met",
    "usable",
}
QUICK = ("--rounds", "1", "--quick", "--device", "cpu")


def type_in(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(command, words)
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
    assert set(CASES) == operators | {
        "train-epoch",
        "validate",
        "train-task",
        "grow-task",
        "workers",
    }


def test_an_unknown_case_is_refused_with_the_known_ones() -> None:
    code, output = type_in("sdg")
    assert code == 2
    assert "'sdg' is not a case; known: adamw, cross-entropy, grad-stats" in output


@pytest.mark.slow
def test_results_are_written_as_json_and_markdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No process is started.
    monkeypatch.setattr("esper.bench.baselines.usable_cores", lambda: 1)
    results, page = (tmp_path / name for name in ("b.json", "b.md"))
    files = ["--json", str(results), "--markdown", str(page)]
    code, output = type_in("train-epoch", "--size", "2x4x2", *QUICK, *files)
    assert code == 0, output
    assert "1 measured; 0 of 0 bars met" in output
    (row,) = json.loads(results.read_text())
    assert row.keys() == FIELDS
    assert row["case"] == "train-epoch"
    assert row["device"] == "cpu"
    assert row["unit"] == "images/s"
    assert row["bar"] is None
    assert row["baseline"].startswith("tuned PyTorch: ")
    assert row["value"] > 0
    assert "| train-epoch |" in page.read_text()


def test_an_interrupt_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = runner.measure
    measured: list[runner.Result] = []

    def interrupted(*arguments: Any) -> runner.Result:
        if measured:
            raise KeyboardInterrupt
        measured.append(measure(*arguments))
        return measured[0]

    monkeypatch.setattr(runner, "measure", interrupted)
    results, page = (tmp_path / name for name in ("b.json", "b.md"))
    files = ["--json", str(results), "--markdown", str(page)]
    code, _ = type_in("sgd", *QUICK, *files)
    assert code == 1
    (row,) = json.loads(results.read_text())
    assert row["case"] == measured[0].case
    assert f"| {measured[0].case} |" in page.read_text()


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_wrong_size_is_refused_with_the_form_of_the_cases_sizes(name: str) -> None:
    case = load_case(name)
    code, output = type_in(name, "--size", "1x2x3x4x5")
    assert code == 2
    form = f"--size {case.form}, for example {size_text(case.sizes[0])}, not 1x2x3x4x5"
    assert f"{name} takes {form}" in output
    for size in (*case.sizes, *case.cuda, *case.quick):
        assert len(size) == len(case.form.split("x"))


def test_a_size_without_a_case_is_refused() -> None:
    code, output = type_in("--size", "4x128x8")
    assert code == 2
    known = "requires the names of cases; known: adamw, cross-entropy, grad-stats"
    assert known in output


@pytest.mark.parametrize("option", ["--json", "--markdown"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    option: str, tmp_path: Path
) -> None:
    file = str(tmp_path / "gone" / "file")
    code, output = type_in("grad-stats", "--quick", option, file)
    assert code == 2
    assert "give a file in an existing folder that you can write to" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused() -> None:
    code, output = type_in("sgd", "--device", "cuda")
    assert code == 2
    assert "'cuda' is not available; this machine has: cpu" in output


def test_a_named_case_needs_its_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    code, output = type_in("stage-batch", "--size", "2x3", *QUICK)
    assert code == 2
    assert "torchvision is not installed" in output


@pytest.mark.parametrize(
    "wrong",
    [
        ("--threads", "0"),
        ("--threads", "9999999999999"),
        ("--size", "0x0"),
        ("--size", ""),
        ("--rounds", "-1"),
        ("--seconds", "nan"),
        ("--device", ""),
        ("--size", "99999999x9999999"),
        ("--json", "/dev/full"),
        ("--markdown", "/dev/null"),
        ("--json", "missing/x.json"),
        ("--json", ""),
        ("--markdown", "missing/x.md"),
        ("--optimizer", ""),
    ],
)
def test_values_that_no_case_can_use_end_with_code_2(wrong: tuple[str, str]) -> None:
    found = CliRunner().invoke(command, ["sgd", "--quick", *wrong])
    assert found.exit_code == 2, found
    assert isinstance(found.exception, SystemExit)
    assert "Error: " in found.output


@pytest.mark.parametrize("option", ["--json", "--markdown", "--task"])
@pytest.mark.parametrize("value", ["", ".", "~nosuchuser/x", "no/where"])
def test_odd_files_and_tasks_are_refused(option: str, value: str) -> None:
    code, told = type_in("adamw", *QUICK, option, value)
    assert code == 2
    assert told.count("Error: ") == 1
    assert "Traceback" not in told
