"""`esper run` and `esper --help`."""

from __future__ import annotations

import csv
import json
import re
import signal
from pathlib import Path

import pytest

from esper.config import RunConfig
from tests.cli.child import start
from tests.cli.conftest import SIMULATED, TINY, Esper
from tests.run.run_helpers import stable_log
from tests.telemetry.sample_events import read_events


def test_help_of_run_names_the_default_that_is_true(esper: Esper) -> None:
    text = " ".join(esper("run", "--help").out.split())
    assert f"[default: {RunConfig().controller}]" in text


def test_the_last_lines_are_the_figures_of_the_run(esper: Esper) -> None:
    found = esper("run", *TINY, "--rounds", "1", "--out", "mine")
    assert (found.code, found.err) == (0, "")
    *_, end = read_events("mine/events.jsonl")
    lines = found.out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("Test accuracy"))
    (told,) = end["comparisons"]
    assert (
        lines[first]
        == f"Test accuracy of 2 hosts grown by schedule: {told['accuracy']:.2f} %."
    )
    assert (
        lines[first + 1]
        == "The same hosts under each baseline, and the paired difference (95 % interval):"
    )
    assert lines[first + 2] == lines[first + 4] == ""
    assert lines[first + 3] == (
        f"  none       {told['reference_accuracy']:6.2f} %   {told['difference']:+6.2f} pp, "
        f"{told['low']:+.2f} to {told['high']:+.2f}: inconclusive, under 10 pairs"
    )
    assert re.fullmatch(r"1 round in \d+ s; run folder: mine", lines[first + 5])
    assert lines[first + 6] == ""
    assert lines[first + 7].startswith("In short, too few hosts to tell")
    assert re.fullmatch(
        r"Parameters: 277 alone, \d+ grown \(\d\.\d seeds kept per host\)\.",
        lines[first + 8],
    )
    assert lines[first + 9].startswith("Not compared: ")
    assert lines[first + 10] == "Next:"
    assert all(line.startswith("  esper ") for line in lines[first + 11 :])


def test_the_config_of_a_run_folder_runs_again(esper: Esper) -> None:
    arguments = (*SIMULATED, "--rounds", "1", "--seed", "5", "--controller", "random")
    esper("run", *arguments, "--out", "first")
    found = esper("run", "--config", "first/config.toml", "--out", "second")
    assert found.code == 0
    assert stable_log(Path("first")) == stable_log(Path("second"))


@pytest.mark.slow
def test_ctrl_c_keeps_the_finished_rounds(tmp_path: Path) -> None:
    child = start(
        "run",
        *TINY,
        "--processes",
        "1",
        "--rounds",
        "2000",
        "--out",
        "mine",
        folder=tmp_path,
    )
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("round 1/2000"):
            break
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert "Traceback" not in err
    assert (
        err.splitlines()[-1] == "Interrupted."
    )  # before it, that a step is played to its end
    # stdout was read up to round 1; what else was printed came after.
    whole = 1 + sum(line.startswith("round ") for line in out.splitlines())
    assert whole < 2000
    assert f"Test accuracy of {2 * whole} hosts grown by schedule" in out
    assert "Interrupted: the figures above cover only the completed rounds." in out
    assert "  esper run --resume mine" in out.splitlines()
    with (tmp_path / "mine" / "metrics.csv").open(newline="") as file:
        assert [row["round"] for row in csv.DictReader(file)] == [
            str(i + 1) for i in range(whole)
        ]
    events = list(read_events(tmp_path / "mine" / "events.jsonl"))
    assert events[-1]["event"] == "RunCompleted"
    assert events[-1]["pairs"] == 2 * whole
    assert json.loads((tmp_path / "mine" / "best_host.json").read_text())["format"] == 2


@pytest.mark.finding("H2")
def test_the_header_and_the_log_tell_the_tier(
    esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = ("--set", "run.tier=compiled", "--rounds", "1")
    monkeypatch.setattr(
        "esper.training.execution.compiled.compile_host",
        lambda *_inputs, **_options: "it has bugs",
    )
    found = esper("run", *TINY, *compiled, "--out", "broken")
    assert found.code == 0
    assert (
        "steps: eager, float32; a faster tier cannot be used: it has bugs"
        in found.out.splitlines()
    )
    begin = next(read_events("broken/events.jsonl"))
    assert (begin["tier"], begin["tier_refused"]) == ("eager", "it has bugs")

    monkeypatch.setenv("ESPER_REQUIRE_NATIVE", "1")
    with pytest.raises(
        RuntimeError,
        match="ESPER_REQUIRE_NATIVE=1, but hosts are not compiled: it has bugs",
    ):
        esper("run", *TINY, *compiled, "--out", "strict")


@pytest.mark.slow
def test_a_run_computes_with_compiled_code(esper: Esper) -> None:
    found = esper(
        "run", *TINY, "--set", "run.tier=compiled", "--rounds", "1", "--out", "mine"
    )
    assert found.code == 0
    assert "steps: compiled, float32" in found.out.splitlines()
    assert [event["event"] for event in read_events("mine/events.jsonl")][
        -1
    ] == "RunCompleted"


def test_a_run_with_minimal_telemetry_records_no_hosts(esper: Esper) -> None:
    found = esper("run", *TINY, "--rounds", "1", "--telemetry", "minimal")
    assert (found.code, found.err) == (0, "")
    (folder,) = Path("runs").iterdir()
    names = [event["event"] for event in read_events(folder / "events.jsonl")]
    assert names[-1] == "RunCompleted"
    assert not {"EpochCompleted", "ActionTaken", "EpisodeCompleted"} & set(names)
    assert esper("report", str(folder)).code == esper("show", str(folder)).code == 0
    refused = esper("run", "--resume", str(folder), "--telemetry", "debug")
    assert refused.code == 2
