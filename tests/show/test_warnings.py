"""Anomalies of learning and the fates of blueprints, in the short form and on the page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.show.growth import blueprint_table
from esper.show.live import short_form
from esper.show.page import report_html
from esper.show.read import open_run
from esper.telemetry.analytics import ALL
from esper.telemetry.event import AnomalyDetected
from esper.telemetry.record import record
from tests.show.page_helpers import html_of

WRONG = [
    AnomalyDetected(
        1,
        "entropy_collapsed",
        "op",
        0.001,
        0.003,
        "head op hardly explores",
        "raise <entropy>",
    ),
    AnomalyDetected(
        2,
        "entropy_collapsed",
        "op",
        0.002,
        0.003,
        "head op is certain",
        "raise <entropy>",
    ),
    AnomalyDetected(
        2,
        "entropy_collapsed",
        "slot",
        0.002,
        0.003,
        "head slot is certain",
        "raise <entropy>",
    ),
    AnomalyDetected(
        2, "not_finite", None, 3.0, 0.0, "3 steps are none", "look at the losses"
    ),
]


@pytest.fixture
def warned(learned: Path, copy: Callable[..., Path]) -> Path:
    folder = copy(learned)
    with (folder / "events.jsonl").open("a") as log:
        log.writelines(json.dumps(record(event)) + "\n" for event in WRONG)
    return folder


def test_the_short_form_has_the_newest_warning_of_each_kind(
    warned: Path, learned: Path
) -> None:
    lines = [line[13:] for line in short_form(open_run(warned)).splitlines()]
    assert "round 2, 2 times: head op is certain; try: raise <entropy>" in lines
    assert "round 2: head slot is certain; try: raise <entropy>" in lines
    assert "round 2: 3 steps are none; try: look at the losses" in lines
    assert not any("hardly explores" in line for line in lines)
    assert "warnings" not in short_form(open_run(learned))


def test_the_page_lists_warnings_with_their_counts_and_advice(
    warned: Path, learned: Path
) -> None:
    page = report_html([open_run(warned)])
    assert "Warnings about the agent" in page
    assert "head op is certain" in page
    assert "raise &lt;entropy&gt;" in page
    assert "not finite" in page
    assert "Warnings about the agent" not in html_of(learned)


def test_blueprints_are_counted_alike_in_both(grown: Path) -> None:
    run = open_run(grown)
    rows = run.view.blueprints.rows()
    assert sum(row.fossilized for row in rows) > 0
    text, page = short_form(run), blueprint_table(run)
    for row in rows:
        assert f"{row.germinated} planted, {row.fossilized} kept" in text
        assert f'<th scope="row">{row.blueprint}</th>' in page
    assert page.count("<tr>") == 1 + len(rows) + (len(rows) > 1)
    assert (f'<th scope="row">{ALL}</th>' in page) == (len(rows) > 1)


def test_counts_follow_a_log_that_is_taken_back(
    grown: Path, copy: Callable[..., Path]
) -> None:
    """A resumed run removes what it logged after its checkpoint."""
    folder = copy(grown)
    run = open_run(folder)
    whole = run.view.blueprints.rows()
    log = folder / "events.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    begun: list[dict[str, Any]] = [json.loads(line) for line in lines]
    half = (
        next(i for i, fields in enumerate(begun) if fields["event"] == "RoundCompleted")
        + 1
    )
    log.write_text("".join(lines[:half]))
    run.refresh()
    assert sum(row.germinated for row in run.view.blueprints.rows()) < sum(
        row.germinated for row in whole
    )
    log.write_text("".join(lines))
    run.refresh()
    assert run.view.blueprints.rows() == whole
