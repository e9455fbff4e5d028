"""`esper-bench` as a person types it. No time is judged."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from esper.bench import runner
from esper.bench.main import CASES, main
from esper.bench.request import BenchArgs, parse_size
from esper.config import ConfigError

FIELDS = {"case", "size", "device", "baseline", "ratio", "ratio_low", "ratio_high", "bar", "unit", "value"}


def type_in(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(main, words)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.exit_code, found.output


def test_every_case_of_the_page_is_there() -> None:
    operators = {"grad-stats", "cross-entropy", "stage-batch", "sgd", "norm-relu-pool"}
    runs = {"train-epoch", "validate", "env-step", "ppo-update", "end-to-end", "telemetry-overhead"}
    assert set(CASES) == operators | runs


def test_results_are_written_as_json_as_a_page_and_as_a_trace(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("b.json", "b.md", "t.json")]
    options = ["--rounds", "1", "--quick", "--device", "cpu", "--json", files[0], "--markdown", files[1]]
    code, output = type_in("train-epoch", "--size", "2x4x2", *options, "--profile", files[2])
    assert code == 0, output
    assert "1 measured; 0 of 0 bars met" in output
    (row,) = json.loads(Path(files[0]).read_text())
    assert row.keys() >= FIELDS
    assert (row["case"], row["device"], row["unit"], row["bar"]) == ("train-epoch", "cpu", "images/s", None)
    assert row["baseline"].startswith("plain eager PyTorch")
    assert row["value"] > 0
    assert "| train-epoch |" in Path(files[1]).read_text()
    events = json.loads(Path(files[2]).read_text())["traceEvents"]
    spans = [event for event in events if event.get("name") == "train-epoch"]
    convolutions = [event for event in events if event.get("name") == "aten::conv2d"]
    assert spans
    assert {event["tid"] for event in convolutions} - {spans[0]["tid"]}, "hosts train on other threads, which are seen"


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = runner.measure
    measured: list[runner.Result] = []

    def interrupted(*arguments: Any, **options: Any) -> runner.Result:
        if measured:
            raise KeyboardInterrupt
        measured.append(measure(*arguments, **options))
        return measured[0]

    monkeypatch.setattr(runner, "measure", interrupted)
    files = [str(tmp_path / name) for name in ("b.json", "b.md")]
    options = ["--rounds", "1", "--quick", "--device", "cpu", "--json", files[0], "--markdown", files[1]]
    code, _ = type_in("sgd", *options)
    assert code == 1
    assert [row["case"] for row in json.loads(Path(files[0]).read_text())] == [measured[0].case]
    assert f"| {measured[0].case} |" in Path(files[1]).read_text()


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_case_says_what_sizes_it_takes(case: str) -> None:
    form = import_module(CASES[case]).SIZE
    form.check(case, [parse_size(form.example)])
    code, output = type_in(case, "--size", "1x2x3x4x5")
    assert code == 1
    assert f"{case} takes --size {form}, for example {form.example}, not 1x2x3x4x5" in output


@pytest.mark.parametrize("text", ["", "x", "4x", "0x1", "4x-1", "4 x 1", "four", "4X8", "٤x1"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="for example 4x128x8"):
        parse_size(text)


def test_a_size_without_a_case_is_refused() -> None:
    code, output = type_in("--size", "4x128x8")
    assert code == 1
    assert "requires the names of cases; known: cross-entropy, end-to-end" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    code, output = type_in("sgd", "--device", "cuda")
    assert code == 1
    assert "'cuda' is not available; this machine has: cpu" in output


def test_a_case_that_was_named_needs_its_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sb3_contrib", None)
    code, output = type_in("ppo-update", "--size", "2x3", "--rounds", "1", "--device", "cpu")
    assert code == 1
    assert 'pip install -e ".[test]"' in output


def test_a_case_without_its_baseline_is_left_out_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from esper.bench.main import measure_all

    monkeypatch.setitem(sys.modules, "sb3_contrib", None)
    console = Console(record=True, width=200)
    modules = {"ppo-update": import_module(CASES["ppo-update"])}
    assert measure_all(modules, BenchArgs(((2, 3),)), 1, 1.0, False, console, lambda results: None) == []
    assert "ppo-update was skipped: the baseline is sb3-contrib" in console.export_text()
