"""Tables, figures and sections of the page."""

from __future__ import annotations

import pytest

from esper.show.html import (
    MAX_ROWS,
    escape,
    figure,
    figures,
    heading,
    note,
    section,
    table,
)
from tests.show.page_helpers import NASTY, Page


def test_text_is_escaped_and_cut() -> None:
    assert escape('<b a="1">&') == "&lt;b a=&quot;1&quot;&gt;&amp;"
    assert escape("x" * 300) == "x" * 199 + "…"
    assert escape("x" * 300, max_length=3) == "xx…"


def test_the_first_column_names_the_rows_and_numbers_are_marked() -> None:
    html = table(
        ["name", "a", "b"],
        [["one", 1.5, "word"], ["two", "+2", "-.5"]],
        "Caption",
        "facts",
    )
    assert '<table class="facts"><caption>Caption</caption>' in html
    assert html.count('<th scope="col">') == 3
    assert '<th scope="row">one</th><td class=n>1.5</td><td>word</td>' in html
    assert '<th scope="row">two</th><td class=n>+2</td><td class=n>-.5</td>' in html


def test_a_table_without_rows_is_nothing() -> None:
    assert table(["name"], []) == ""


@pytest.mark.parametrize(
    ("rows", "shown", "noted"),
    [(MAX_ROWS, MAX_ROWS, False), (MAX_ROWS + 1, MAX_ROWS, True)],
)
def test_a_long_table_is_cut_and_says_so(rows: int, shown: int, noted: bool) -> None:
    html = table(["name"], ([str(row)] for row in range(rows)))
    assert html.count('<th scope="row">') == shown
    assert (f"The first {MAX_ROWS} of {rows} rows." in html) == noted


def test_a_figure_has_its_numbers_only_if_there_are_some() -> None:
    assert "<details>" not in figure("Title", "Words.", "<svg></svg>")
    assert "<summary>Numbers</summary>N</details>" in figure(
        "Title", "Words.", "<svg></svg>", "N"
    )


def test_figures_without_content_and_headings_that_are_not_shown_are_nothing() -> None:
    assert (figures("", ""), heading("run", False)) == ("", "")
    assert figures("", "<p>") == "<div class=figures><p></div>"
    assert heading("<run>", True) == "<h3>&lt;run&gt;</h3>"


def test_every_part_takes_hostile_text() -> None:
    chart = "<svg></svg>"
    page = Page(
        section(
            NASTY,
            NASTY,
            table([NASTY], [[NASTY, NASTY]], NASTY),
            figure(NASTY, NASTY, chart),
            note(NASTY),
        )
    )
    assert {"script", "img", "style"}.isdisjoint(page.tags)
    assert "<script>window.hacked=1</script>" in page.text
