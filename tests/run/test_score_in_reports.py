"""A run on a task with its own score: all printed texts name it, and none is in per cent."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import esper
from esper.cli.run import result_lines
from esper.compare.arms import read_arms
from esper.compare.comparison_run import ComparisonRun
from esper.compare.table import print_report
from esper.run.telemetry import RunSummary
from esper.show.console import ConsoleSink
from esper.show.live import short_form
from esper.show.page import report_html
from esper.show.read import open_run
from esper.telemetry.event import ScoreDefined
from tests.core_helpers import tiny_config
from tests.env.test_objectives import regression

NOT_SCORES = re.compile(r"95 % interval|middle 80 %|9[05] %|\d+%")
"""Texts in per cent of every run: levels of intervals, and shares of time."""


def in_per_cent(text: str) -> list[str]:
    """The lines that still speak of per cent or percentage points."""
    lines = NOT_SCORES.sub("", text).splitlines()
    return [line for line in lines if re.search(r"\d ?%|\bpp\b|, %|[Aa]ccurac", line)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, RunSummary]:
    """A finished run, what its console printed, and its summary."""
    folder, stream = tmp_path_factory.mktemp("run") / "r", io.StringIO()
    settings = tiny_config(2, 5, run={"lanes": 1, "controller": "random", "rounds": 1})
    task = replace(regression(), score_name="skill")
    with esper.Experiment(
        settings,
        folder,
        callbacks=[ConsoleSink(Console(file=stream, width=200))],
        task=task,
    ) as made:
        summary = made.run()
    return folder, stream.getvalue(), summary


def test_the_console_and_the_result_name_the_score(
    run: tuple[Path, str, RunSummary],
) -> None:
    _, printed, summary = run
    text = "\n".join([printed, *result_lines(summary)])
    assert re.search(r"final validation skill -?\d\.\d{3}\n", printed)
    assert re.search(r"Test skill of \d+ hosts grown by random: -?\d\.\d{4}\.", text)
    assert in_per_cent(text) == []


def test_show_and_the_report_name_the_score(run: tuple[Path, str, RunSummary]) -> None:
    opened = open_run(run[0])
    assert opened.of(ScoreDefined) == [ScoreDefined("skill", "", 100.0)]
    shown = short_form(opened)
    assert re.search(r"skill: grown -?\d\.\d{3}  ", shown)
    assert in_per_cent(shown) == []
    page = report_html([opened])
    visible = re.sub(
        r"<style>.*?</style>|<svg.*?</svg>|<details.*?</details>|<[^>]*>",
        "\n",
        page,
        flags=re.DOTALL,
    )
    assert "Skill by epoch" in visible
    assert in_per_cent(visible) == []


def test_a_comparison_is_made_in_the_score(tmp_path: Path) -> None:
    tables = tiny_config(1, 5).model_dump(exclude_none=True)
    tables["task"].pop("name")
    arms = read_arms(["random", "none"], tables)
    stream = io.StringIO()
    progress = ConsoleSink(Console(file=stream, width=160)).handle
    task = replace(regression(), score_name="skill")
    result = ComparisonRun(arms, 2, tmp_path / "c", task=task, progress=progress).run()
    print_report(result, Console(file=stream, width=160), full=True)
    assert "Test skill (higher is better)" in stream.getvalue()
    assert in_per_cent(stream.getvalue()) == []
    values = result.metrics[0].metric.values(result.hosts["none"])
    assert values == pytest.approx(
        [host.accuracy / 100 for host in result.hosts["none"]]
    )
