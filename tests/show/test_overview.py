"""The summary of runs, their verdicts, events and configuration."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.show import overview
from esper.show.charts import IntervalRow
from esper.show.overview import (
    configuration_section,
    events_section,
    summary_section,
    verdicts_figure,
    verdicts_table,
)
from esper.show.read import Run, open_run
from esper.telemetry.event import (
    ActionTaken,
    GateEvaluated,
    GovernorRollback,
    RunCompleted,
    RunResumed,
)
from tests.show.page_helpers import fed

Copy = Callable[..., Path]


def cells(html: str, row: str) -> list[str]:
    """The texts of the cells of the row that ``row`` names."""
    found = re.search(rf"<tr><th scope=\"row\">{re.escape(row)}</th>(.*?)</tr>", html)
    assert found, row
    return re.findall(r"<td[^>]*>(.*?)</td>", found[1])


def test_the_summary_has_a_column_for_each_run(grown: Path, learned: Path) -> None:
    html = summary_section([open_run(grown, "one"), open_run(learned, "two")])
    assert cells(html, "controller") == ["schedule", "ppo"]
    assert cells(html, "state") == [
        "finished: 2 rounds played and compared",
        "finished: 3 rounds played and compared",
    ]
    assert cells(html, "epochs per host")[0] == "24"


def test_unknown_facts_are_said_to_be_unknown(tmp_path: Path) -> None:
    html = summary_section(
        [Run(tmp_path, "empty", {"run": {"controller": "plans", "seed": 7}})]
    )
    assert (cells(html, "controller"), cells(html, "seed")) == (["plans"], ["7"])
    assert (cells(html, "task"), cells(html, "seconds")) == (
        ["not known"],
        ["not finished"],
    )
    assert cells(html, "parameters, grown") == ["not compared yet"]
    assert "Nothing was compared yet." in html


def test_what_could_not_be_read_is_listed_once_with_its_run(
    grown: Path, copy: Copy
) -> None:
    folder = copy(grown)
    (folder / "config.toml").write_text("not [toml")
    html = summary_section([open_run(folder, "torn"), open_run(grown, "whole")])
    assert html.count("class=problems") == 1
    assert "torn: not everything could be read" in html
    assert "config.toml cannot be read" in html


def test_verdicts_are_those_of_the_comparison(
    grown: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[IntervalRow] = []
    monkeypatch.setattr(
        overview,
        "interval_chart",
        lambda _title, rows, *_: drawn.extend(rows) or "<svg></svg>",
    )
    run = open_run(grown)
    (completed,) = run.of(RunCompleted)
    verdicts_figure([run])
    assert [(r.name, r.value, r.low, r.high) for r in drawn] == [
        (c.reference, c.difference, c.low, c.high) for c in completed.comparisons
    ]
    html = verdicts_table([run])
    for c in completed.comparisons:
        row = cells(html, c.reference)
        assert row[0] == f"{c.accuracy:.2f}"
        assert row[2] == f"{c.difference:+.2f}"
        assert (row[-2], row[-1]) == (
            str(completed.pairs),
            c.verdict.replace("'", "&#x27;"),
        )


def test_actions_and_gates_are_counted_by_their_outcome(
    grown: Path, tmp_path: Path
) -> None:
    def action(op: str, accepted: bool) -> ActionTaken:
        return ActionTaken(0, 0, 1, op, "r0c0", None, accepted, "")

    run = Run(tmp_path, "counted")
    fed(run, action("PRUNE", True), action("GERMINATE", False), action("PRUNE", True))
    fed(
        run,
        *(
            GateEvaluated(0, 0, 1, "r0c0", "G1", passed, 0.0, ())
            for passed in (True, False, False)
        ),
    )
    html = events_section([run])
    assert cells(html, "PRUNE") == ["2", "0"]
    assert cells(html, "GERMINATE") == ["0", "1"]
    assert cells(html, "G1") == ["1", "2"]
    assert "No action, gate or rollback was logged." in events_section(
        [Run(tmp_path, "empty")]
    )


def test_rollbacks_and_stops_are_incidents(tmp_path: Path) -> None:
    run = Run(tmp_path, "a run")
    fed(run, GovernorRollback(3, 1, 7, "the loss rose", 9.0, 2.0, 5, 1))
    fed(run, RunResumed(4, 9, 8, 30, None, None, 0.0, epochs=2))
    html = events_section([run])
    assert "the loss rose" in html
    assert cells(html, "after round 4, 2 epochs into the next round") == [
        "resumed",
        "the run had stopped there, or before the next checkpoint",
    ]


@pytest.mark.parametrize("same", [True, False])
def test_differences_between_configurations_come_first(
    same: bool, tmp_path: Path
) -> None:
    configs: list[dict[str, Any]] = [
        {"run": {"seed": seed}, "env": {"gates": {"min_gain": 0.5}}}
        for seed in (1, 1 if same else 2)
    ]
    html = configuration_section(
        [Run(tmp_path, f"run {i}", config) for i, config in enumerate(configs)]
    )
    before, _, whole = html.partition("<details>")
    assert ("The configurations are the same." in before) == same
    assert ("run.seed" in before) != same
    assert "env.gates.min_gain" not in before
    assert cells(whole, "env.gates.min_gain") == ["0.5", "0.5"]
    assert "No env.json could be read." in whole
