"""The page is complete and self-contained, and escapes everything from outside, whatever the numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.config import ConfigError
from esper.show.live import short_form
from esper.show.page import SECTIONS, report_html, write_report
from esper.show.read import open_run, open_runs
from esper.telemetry.event import EpochCompleted, RunCompleted
from tests.selection import slow_except
from tests.show.page_helpers import Page, drawings, html_of, nasty, not_finite


def test_a_report_has_all_its_parts(learned: Path) -> None:
    html = html_of(learned)
    page = Page(html)
    assert set(SECTIONS) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    for title in (
        "Difference to each baseline",
        "Accuracy by epoch",
        "Accuracy by round",
        "Accuracy against parameters",
        "Round 3, 2 hosts",
        "Return by round",
        "Reward terms by round",
        "Reward terms by epoch",
        "Policy entropy",
        "KL divergence",
        "practice",
        "Seconds of each round",
        "Memory at the end of the last round",
        "copies per host, cpu: ",
        "The whole configuration",
    ):
        assert title in page.text, title
    assert "run.evaluation_pairs" in page.text
    assert "Not everything could be read" not in page.text


def test_contributions_are_shown_with_their_intervals(grown: Path) -> None:
    run = open_run(grown)
    last = [e for e in run.of(EpochCompleted) if e.contributions][-1]
    assert set(last.contribution_errors) == set(last.contributions)
    slot, value = next(iter(last.contributions.items()))
    error = last.contribution_errors[slot]
    page = Page(report_html([run]))
    row = f"host {last.env} {slot}"
    assert row in page.text
    assert (
        f"{value:+.2f}{value - 1.96 * error:.2f}{value + 1.96 * error:.2f}" in page.text
    )  # cells of one row
    assert "Shapley values" in page.text


def test_contributions_of_an_older_log_have_no_intervals(
    grown: Path, copy: Callable[..., Path]
) -> None:
    def older(fields: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in fields.items()
            if name != "contribution_errors"
        }

    page = Page(html_of(copy(grown, older)))
    assert "not measured" in page.text


def test_nothing_is_loaded_from_elsewhere_and_no_script_is_run(
    learned: Path, grown: Path
) -> None:
    html = html_of(learned, grown)
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(page.tags)
    assert not [
        name for name, _ in page.attributes if name.startswith("on") or name == "src"
    ]
    assert all(
        value.startswith("#")
        for name, value in page.attributes
        if name.endswith("href")
    )
    assert html.count("url(") == html.count("url(#")
    assert "@import" not in html
    assert "default-src 'none'" in html


def test_pictures_have_a_title_and_a_description_for_screen_readers(
    learned: Path, grown: Path
) -> None:
    pictures = drawings(html_of(learned, grown))
    assert len(pictures) > 20
    for svg in pictures:
        assert svg.get("role") == "img"
        title, description = (
            next(e for e in svg if e.get("id") == name)
            for name in (svg.get("aria-labelledby") or "").split()
        )
        assert title.text
        assert description.tag == "{http://www.w3.org/2000/svg}desc"


def test_the_page_follows_dark_mode_and_charts_stay_on_white(learned: Path) -> None:
    style = html_of(learned).partition("<style>")[2].partition("</style>")[0]
    assert "prefers-color-scheme:dark" in style
    assert re.search(r"\nsvg\{[^}]*background:#fff", style)


@pytest.mark.parametrize("which", slow_except(["learned"], ["learned", "grown"]))
def test_markup_quotes_and_control_codes_from_a_log_are_text(
    which: str, request: pytest.FixtureRequest, copy: Callable[..., Path]
) -> None:
    original: Path = request.getfixturevalue(which)
    folder = copy(original, nasty, name="<script>'\"& ü")
    config = folder / "config.toml"
    config.write_text(
        config.read_text()
        + '\n["<script>"]\nx = \'<script>window.hacked=1</script>"&\'\n'
    )
    html = html_of(folder, original)
    page = Page(html.encode("utf-8", "replace").decode())
    assert not {"script", "img"} & set(page.tags)
    assert not [
        name for name, _ in page.attributes if name.startswith("on") or name == "src"
    ]
    assert "<script>window.hacked=1</script>\"'&</style>" in page.text  # there, as text
    assert "ü😀" in page.text
    assert not set(html) & {"\x1b", "\u202e", "\x00", "\ud800"}
    assert len(drawings(html)) > 10
    assert (
        open_run(folder).all_problems() == []
    )  # every event was shown, and none left out
    words = short_form(open_run(folder))
    assert "window.hacked" in words
    assert not set(words) & {"\x1b", "\u202e", "\x00", "\ud800"}


@pytest.mark.parametrize("which", slow_except(["learned"], ["learned", "grown"]))
def test_numbers_that_are_none_leave_gaps_and_break_nothing(
    which: str, request: pytest.FixtureRequest, copy: Callable[..., Path]
) -> None:
    folder = copy(request.getfixturevalue(which), not_finite)
    run = open_run(folder)
    assert run.all_problems() == []
    html = report_html([run])
    Page(html)
    for svg in drawings(html):
        for element in svg.iter():
            for name in ("d", "x", "y", "width", "height", "transform"):
                assert not re.search("nan|inf", element.get(name) or ""), element.attrib
    assert short_form(run)


def test_several_runs_are_named(learned: Path, grown: Path) -> None:
    page = Page(html_of(learned, grown))
    assert "2 runs: learned, grown" in page.text
    for name in ("learned: grown", "grown: grown", "Differences between the runs"):
        assert name in page.text
    assert (
        "reward.mode"
        not in page.text[
            page.text.index("Differences between the runs") : page.text.index(
                "The whole conf"
            )
        ]
    )


def test_the_same_run_gives_the_same_page(learned: Path) -> None:
    made = re.compile(r"Made [\d: -]*")
    assert made.sub("", html_of(learned)) == made.sub(
        "", report_html(open_runs([learned]))
    )


def test_a_run_without_figures_of_a_comparison_says_so(
    learned: Path, copy: Callable[..., Path]
) -> None:
    folder = copy(
        learned,
        lambda fields: None if fields["event"] == RunCompleted.__name__ else fields,
    )
    page = Page(html_of(folder))
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
