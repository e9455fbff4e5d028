"""The lives of hosts: which host is the best, and its chart; the slots of a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from esper.show.life import best_life, lanes_chart, save_life
from esper.show.page import report_html
from esper.show.read import open_run
from esper.telemetry.event import (
    ContextDrawn,
    EpisodeCompleted,
    GovernorRollback,
    StageChanged,
)
from tests.show.page_helpers import html_of, viewed
from tests.show.test_charts import drawn
from tests.telemetry.sample_events import epoch, started

Copy = Callable[..., Path]


def test_it_is_the_host_with_the_best_committed_network(grown: Path) -> None:
    run = open_run(grown)
    host = best_life(run.view)
    assert host is not None
    best = max(run.of(EpisodeCompleted), key=lambda e: e.committed_accuracy)
    assert (host.life.episode, host.life.env) == (best.episode, best.env)
    assert "best of 2 hosts" in host.title
    assert len(host.grown) == len(host.alone) == 8

    committed = best.committed_accuracy
    alone = best.baseline_accuracy
    assert host.words.startswith(
        f"validation accuracy {committed:.1f} %, beside {alone:.1f} %"
    )
    assert "conv_light in r0c0" in host.words


def test_the_chart_is_saved_next_to_the_run_and_shown_in_its_report(
    grown: Path, copy: Copy
) -> None:
    run = open_run(copy(grown))
    host = best_life(run.view)
    assert host is not None
    save_life(host, run.folder)
    text = (run.folder / "life.svg").read_text()
    for word in ("with growth", "left alone", "fossilized", "The best of 2"):
        assert word in text
    assert "The best of 2 hosts" in html_of(grown)


@pytest.mark.usefixtures("no_drawings")
def test_a_run_without_a_complete_host_has_no_life(grown: Path, copy: Copy) -> None:
    left_out = "EpisodeCompleted"
    folder = copy(grown, lambda e: None if e["event"] == left_out else e)
    run = open_run(folder)
    assert best_life(run.view) is None
    assert "The best of" not in report_html([run])


def test_no_host_is_the_best_one_where_hosts_differ(grown: Path) -> None:
    """The host with the easiest data would be drawn."""
    view = open_run(grown).view
    assert best_life(view) is not None
    view.handle(ContextDrawn(0, 0, "digits", 4, 100, 8, 1.0, 0.0, "adamw", 0.06))
    assert best_life(view) is None


def change(at: int, before: str, after: str) -> StageChanged:
    return StageChanged(3, 0, at, "r0c0", "norm", before, after, "advance")


def test_lanes_are_drawn_to_scale_and_described_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = drawn(monkeypatch)
    view = viewed(
        started(slots=("r0c0", "r0c1"), episode_length=30),
        replace(change(0, "DORMANT", "GERMINATED"), cause="germinate"),
        change(2, "GERMINATED", "TRAINING"),
        change(10, "TRAINING", "HOLDING"),
        GovernorRollback(3, 0, 12, "loss spike", 8.5, 4.25, 10, 1),
        epoch(3, 30),
        epoch(4, 30),
    )
    assert lanes_chart(view, "t").words == (
        "host 3: r0c0: norm germinated from epoch 0 to 2; r0c0: norm training from "
        "epoch 2 to 10; r0c0: norm holding from epoch 10 to 30; rollback at epoch 12; "
        "host 4: no seed was planted"
    )
    (axes,) = figures[0].axes
    background, *stages = axes.containers
    assert len(background) == 4, "one lane for each slot of each host, used or not"
    lanes = []
    for bars in stages:
        lanes += [(bar.get_x(), bar.get_width()) for bar in bars]
    assert lanes == [(0, 2), (2, 8), (10, 20)]
    assert [text.get_text() for text in axes.texts] == ["norm"]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["host 3 r0c0", "r0c1", "host 4 r0c0", "r0c1"]
    legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert legend == ["germinated", "training", "holding"]
