"""The life of the best host: which host it is, and its chart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from esper.show.life import best_life, save_life
from esper.show.page import report_html
from esper.show.read import open_run
from esper.telemetry.event import EpisodeCompleted

Copy = Callable[..., Path]


def test_it_is_the_host_with_the_best_committed_network(grown: Path) -> None:
    run = open_run(grown)
    host = best_life(run.view)
    assert host is not None
    best = max(run.of(EpisodeCompleted), key=lambda e: e.committed_accuracy)
    assert (host.life.episode, host.life.env) == (best.episode, best.env)
    assert host.episode.committed_accuracy == best.committed_accuracy
    assert host.hosts == len(run.of(EpisodeCompleted)) == 4
    assert len(host.grown) == len(host.alone) == 24


def test_its_words_name_what_it_kept(grown: Path) -> None:
    host = best_life(open_run(grown).view)
    assert host is not None
    assert host.words.startswith(
        f"validation accuracy {host.episode.committed_accuracy:.1f} %, beside {host.episode.baseline_accuracy:.1f} %"
    )
    for seed in host.life.stretches:
        if seed.stage == "FOSSILIZED":
            assert f"{seed.blueprint} in {seed.slot}" in host.words


def test_the_chart_is_saved_next_to_the_run_and_shown_in_its_report(
    grown: Path, copy: Copy
) -> None:
    run = open_run(copy(grown))
    host = best_life(run.view)
    assert host is not None
    save_life(host, run.folder)
    text = (run.folder / "life.svg").read_text()
    assert text.startswith("<svg")
    assert "xmlns=" in text[:500]
    for word in (
        "with growth",
        "hosts left alone",
        "fossilized",
        "The best of 4 hosts",
    ):
        assert word in text
    page = report_html([run])
    assert page.count("The best of 4 hosts") >= 2
    assert "life" in page


def test_a_run_without_a_complete_host_has_no_life(grown: Path, copy: Copy) -> None:
    run = open_run(
        copy(
            grown,
            lambda fields: None if fields["event"] == "EpisodeCompleted" else fields,
        )
    )
    assert best_life(run.view) is None
    assert "The best of" not in report_html([run])
