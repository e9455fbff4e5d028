"""The page is complete and self-contained, and escapes everything from outside, whatever the numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from esper.config import ConfigError
from esper.show.charts import Table
from esper.show.live import short_form
from esper.show.page import configuration, report_html, score_of, units, write_report
from esper.show.read import open_run, open_runs
from esper.show.sections import capital
from esper.show.view import RunView
from esper.telemetry.event import RunCompleted, ScoreDefined
from esper.telemetry.score import ACCURACY, ScoreUnit
from tests.show.page_helpers import (
    Page,
    drawings,
    html_of,
    nasty,
    viewed,
)


@pytest.mark.usefixtures("no_drawings")
def test_a_report_has_all_its_parts(learned: Path) -> None:
    page = Page(report_html([open_run(learned)]))
    assert {"verdict", "accuracy", "slots", "agent", "configuration"} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    for title in (
        "Difference to each baseline",
        "Accuracy by epoch",
        "Accuracy by round",
        "Slots in round 3",
        "Discounted return",
        "Reward terms",
        "Entropy",
        "KL",
        "Discounted return on validation hosts",
        "Seconds by phase",
        "copies per host",
        "The whole configuration",
    ):
        assert title in page.text, title
    assert "run.evaluation_pairs" in page.text
    assert "not everything could be read" not in page.text
    answer, life, difference = map(
        page.text.index, ("grown by ppo", "The best of", "Difference to each")
    )
    assert answer < life < difference


def test_the_column_of_one_run_is_not_named_after_it(learned: Path) -> None:
    """A folder may be called default."""
    (whole, _) = configuration([open_run(learned, "default")])
    assert isinstance(whole, Table)
    assert list(whole.heads) == ["key", "value"]
    *_, versions = configuration([open_run(learned, name) for name in ("a", "b")])
    assert isinstance(versions, Table)
    assert list(versions.heads) == ["key", "a", "b"]


@pytest.mark.usefixtures("no_drawings")
def test_a_table_shows_its_first_rows_and_says_so(learned: Path) -> None:
    run = open_run(learned)
    run.config = {"x": {str(number): number for number in range(450)}}
    html = report_html([run])
    assert "The first 200 of 450 rows." in html
    assert html.count('<th scope="row">x.') == 200
    assert '<td class=n data-head="copied">' not in html


def test_numbers_are_marked_and_named_for_a_narrow_screen(grown: Path) -> None:
    html = html_of(grown)
    assert '<td class=n data-head="planted">2</td>' in html
    assert '<td data-head="kept">r0c0 conv_light</td>' in html


@pytest.mark.usefixtures("no_drawings")
def test_what_could_not_be_read_is_listed_with_its_run(
    grown: Path, copy: Callable[..., Path]
) -> None:
    folder = copy(grown, name="torn")
    (folder / "config.toml").write_text("not [toml")
    page = Page(report_html(open_runs([folder, grown])))
    assert "torn: not everything could be read" in page.text
    assert "config.toml cannot be read" in page.text
    assert page.text.count("not everything could be read") == 1


def test_nothing_is_loaded_from_elsewhere_and_no_script_is_run(
    learned: Path, grown: Path
) -> None:
    html = html_of(learned, grown)
    page = Page(html)
    assert not {"script", "link", "iframe", "object", "image"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on")
        assert name != "src" or value.startswith("data:image/svg+xml;base64,")
        assert not name.endswith("href") or value.startswith("#")
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html


def test_pictures_are_described_for_screen_readers(learned: Path, grown: Path) -> None:
    html = html_of(learned, grown)
    words = [value for name, value in Page(html).attributes if name == "alt"]
    assert len(words) == len(drawings(html)) > 10
    assert all(words)


def test_markup_quotes_and_control_codes_from_a_log_are_text(
    grown: Path, copy: Callable[..., Path]
) -> None:
    folder = copy(grown, nasty, name="<script>'\"& ü")
    config = folder / "config.toml"
    config.write_text(
        config.read_text()
        + '\n["<script>"]\nx = \'<script>window.hacked=1</script>"&\'\n'
    )
    html = report_html([open_run(folder)])
    page = Page(html.encode("utf-8", "replace").decode())
    assert "script" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "<script>window.hacked=1</script>\"'&</style>" in page.text  # there, as text
    assert "ü😀" in page.text
    assert not set(html) & {"\x1b", "\u202e", "\x00", "\ud800"}
    assert len(drawings(html)) > 2
    assert (
        open_run(folder).all_problems() == []
    )  # every event was shown, and none left out
    words = short_form(open_run(folder))
    assert "window.hacked" in words
    assert not set(words) & {"\x1b", "\u202e", "\x00", "\ud800"}


def test_several_runs_share_charts_and_stand_side_by_side(
    learned: Path, grown: Path
) -> None:
    page = Page(html_of(learned, grown))
    one, other = learned.name, grown.name
    assert f"2 runs: {one}, {other}" in page.text
    for name in (f"{one}: grown", f"{other}: grown", f"{other}: Comparison"):
        assert name in page.text
    different, _, whole = page.text.partition("The whole configuration")
    _, _, different = different.partition("Differences between the runs")
    assert "run.controller" in different
    assert "reward.mode" not in different
    assert "reward.mode" in whole


@pytest.mark.usefixtures("no_drawings")
def test_a_run_without_figures_of_a_comparison_says_so(
    learned: Path, copy: Callable[..., Path]
) -> None:
    folder = copy(
        learned,
        lambda fields: None if fields["event"] == RunCompleted.__name__ else fields,
    )
    page = Page(report_html([open_run(folder)]))
    assert "Nothing was compared yet" in page.text
    assert "interrupted: all 3 rounds played, not all compared" in page.text


def test_a_report_replaces_a_report_and_nothing_else(
    learned: Path,
    copy: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, html = copy(learned), html_of(learned)
    monkeypatch.setattr("esper.show.page.report_html", lambda _runs: html)
    first = write_report([folder])
    assert first == folder / "report.html"
    assert write_report([folder]) == first
    mine = tmp_path / "thesis.html"
    mine.write_text("<!doctype html><p>mine")
    with pytest.raises(ConfigError, match="is not an Esper report; give another --out"):
        write_report([folder], mine)
    assert mine.read_text().endswith("mine")
    with pytest.raises(ConfigError, match="give a file in an existing folder"):
        write_report([folder], tmp_path / "nowhere" / "r.html")


def test_a_picture_that_fails_says_why_and_the_page_is_written(
    learned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("no <font>")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fails)
    html = report_html(open_runs((learned,)))
    assert "not drawn: ValueError: no &lt;font&gt;" in html
    assert "verdict" in Page(html).ids


def test_runs_with_different_scores_share_percentage_points() -> None:
    one, other = RunView(), viewed(ScoreDefined("bits", "bit", 20.0))
    assert score_of([one, one]) == ACCURACY
    assert score_of([one, other]) == ScoreUnit("score", "pp")
    assert units([one]).startswith("Accuracies are percentages")
    assert "20 percentage points" in units([other])
    assert [capital(name) for name in ("accuracy", "BLEU score")] == [
        "Accuracy",
        "BLEU score",
    ]
