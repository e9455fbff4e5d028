"""Charts draw the exact values, accept any numbers, and lifecycles are read correctly."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from esper.show import charts
from esper.show.charts import (
    IntervalRow,
    Line,
    interval_chart,
    lanes_chart,
    line_chart,
    line_figure,
    scatter_chart,
    tick_label,
)
from esper.telemetry.event import GovernorRollback, StageChanged
from esper.telemetry.seed_history import Life
from esper.telemetry.text import clean, number
from tests.telemetry.sample_events import epoch

SVG = "{http://www.w3.org/2000/svg}"


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures of the charts made after this call."""
    figures: list[Figure] = []

    def keep(figure: Figure, title: str, description: str) -> str:
        figures.append(figure)
        return description

    monkeypatch.setattr(charts, "inline_svg", keep)
    return figures


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (0.0, "0"),
        (0.05, "0.05"),
        (1e-6, "1e-06"),
        (1234, "1,234"),
        (25_000, "25k"),
        (2_500_000, "2.5M"),
    ],
)
def test_tick_labels_are_short(value: float, label: str) -> None:
    assert tick_label(value) == label


def test_unknown_and_non_finite_numbers_become_words() -> None:
    assert number(1234.567) == "1,234.57"
    assert number(0.5, sign=True, unit="pp") == "+0.50 pp"
    assert number(0.000012) == "1.20e-05"
    words = [number(value) for value in (None, math.nan, math.inf, -math.inf)]
    assert words == ["not measured", "not a number", "infinite", "minus infinite"]


def test_clean_text_is_one_short_line_without_control_codes() -> None:
    assert clean("a\nb\x07c" + "x" * 300).startswith("a b\N{REPLACEMENT CHARACTER}c")
    assert len(clean("x" * 300)) == 200


def test_a_line_chart_draws_the_values_with_axes_and_a_legend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = drawn(monkeypatch)
    lines = [
        Line(
            "a",
            [0, 1, 2, 3],
            [1.0, 2.0, math.nan, 4.0],
            0,
            [0.5, 1.5, 2.5, 3.5],
            [1.5, 2.5, 3.5, 4.5],
        ),
        Line("baseline", [0, 3], [1.0, 1.0], -1, reference=True),
    ]
    words = line_chart("title", lines, "epochs done", "accuracy, %", include=[10.0])
    (axes,) = figures[0].axes
    first, second, _ = axes.lines
    assert list(first.get_xdata()) == [0, 1, 2, 3]
    assert [str(y) for y in first.get_ydata()] == [
        "1.0",
        "2.0",
        "nan",
        "4.0",
    ]  # NaN lifts the pen
    assert (first.get_linestyle(), second.get_linestyle()) == ("-", "--")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epochs done", "accuracy, %")
    assert axes.get_ylim()[1] >= 10.0
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [
        "a",
        "baseline",
    ]
    assert len(axes.collections) == 1  # the band
    assert words == "a ends at 4.00; baseline ends at 1.00"


def test_parameters_over_more_than_a_decade_have_a_logarithmic_axis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = drawn(monkeypatch)
    for largest in (2_000.0, 200_000.0):
        scatter_chart(
            "title",
            [Line("hosts", [300.0, largest], [60.0, 70.0], 0)],
            "parameters",
            "accuracy, %",
        )
    assert [figure.axes[0].get_xscale() for figure in figures] == ["linear", "log"]


def test_each_value_has_a_row_with_its_interval_if_that_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = drawn(monkeypatch)
    rows = [
        IntervalRow("a", 1.0, 0.5, 3.0),
        IntervalRow("b", 2.0, None, None),
        IntervalRow("c", 4.0, -math.inf, 5.0),
    ]
    interval_chart("title", rows, "pp")
    (axes,) = figures[0].axes
    *values, _ = [
        [float(x) for x in line.get_xdata()] for line in axes.lines
    ]  # the last one is zero
    assert [point[0] for point in values[::2]] == [1.0, 2.0, 4.0]
    assert values[1] == [0.5, 3.0]
    assert all(math.isnan(low) for low, _ in values[3::2])
    assert axes.get_xlim()[0] < 0 < axes.get_xlim()[1]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]


anything = st.floats() | st.sampled_from([0.0, 1e308, -1e308, 5e-324])


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.tuples(anything, anything, anything, anything), min_size=1, max_size=8)
)
def test_any_numbers_can_be_drawn(
    rows: list[tuple[float, float, float, float]],
) -> None:
    x, y, low, high = ([row[place] for row in rows] for place in range(4))
    pictures = [
        line_chart("t", [Line("a", x, y, 0, low, high)], "x", "y"),
        scatter_chart("t", [Line("p", x, y, 0)], "x", "y"),
        interval_chart("t", [IntervalRow("a", *row[:3]) for row in rows], "x"),
    ]
    for svg in pictures:
        for element in ElementTree.fromstring(svg).iter():
            for name in ("d", "x", "y", "width", "height", "transform"):
                assert not {"nan", "inf"} & set(
                    (element.get(name) or "").lower().split()
                ), element.attrib


def test_a_long_line_has_its_first_numbers_in_a_table() -> None:
    x = [float(place) for place in range(450)]
    with mock.patch.object(charts, "line_chart", return_value=""):
        page = line_figure("t", "words", [Line("a", x, x, 0)], "round", "y")
    assert page.count("<tr>") == 1 + 200
    assert "The first 200 of 450 rows." in page


def change(at: int, before: str, after: str, slot: str = "r0c0") -> StageChanged:
    return StageChanged(
        env=0,
        episode=0,
        epoch=at,
        slot=slot,
        blueprint="norm",
        before=before,
        after=after,
        cause="advance",
    )


def test_lanes_are_drawn_to_scale_and_described_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = drawn(monkeypatch)
    life = Life(0, 3)
    for event in (
        replace(change(0, "DORMANT", "GERMINATED"), cause="germinate"),
        change(2, "GERMINATED", "TRAINING"),
        change(10, "TRAINING", "HOLDING"),
        GovernorRollback(3, 0, 12, "loss spike", 8.5, 4.25, 10, 1),
        epoch(3, 30),
    ):
        life.handle(event)
    words = lanes_chart("t", [life, Life(0, 4)], ["r0c0", "r0c1"], 30)
    assert words == (
        "host 3: r0c0: norm germinated from epoch 0 to 2; r0c0: norm training from epoch 2 to 10; "
        "r0c0: norm holding from epoch 10 to 30; rollback at epoch 12; host 4: no seed was planted"
    )
    (axes,) = figures[0].axes
    background, *stages = axes.containers
    assert len(background) == 4  # one lane for each slot of each host, used or not
    assert [[(bar.get_x(), bar.get_width()) for bar in bars] for bars in stages] == [
        [(0, 2)],
        [(2, 8)],
        [(10, 20)],
    ]
    assert [text.get_text() for text in axes.texts] == ["norm"]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["host 3 r0c0", "r0c1", "host 4 r0c0", "r0c1"]
    legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert set(legend) == {"germinated", "training", "holding", "rollback"}


def test_a_chart_is_one_svg_element_that_leaves_the_page_alone() -> None:
    lines = [Line("a <b> $x$", [0, 1], [1.0, 2.0], 0), Line("b", [0, 1], [1.0, 3.0], 1)]
    one, again, other = (
        line_chart(title, lines, "x", "y") for title in ("one", "one", "other")
    )
    assert one == again  # neither dates nor random ids
    root = ElementTree.fromstring(one)
    assert root.tag == f"{SVG}svg"
    assert not list(root.iter(f"{SVG}style"))  # it would style the whole page
    assert "a <b> $x$" in [
        text.text for text in root.iter(f"{SVG}text")
    ]  # neither markup nor mathematics
    ids = [
        {e.get("id") for e in ElementTree.fromstring(svg).iter() if e.get("id")}
        for svg in (one, other)
    ]
    assert ids[0]
    assert not ids[0] & ids[1]
    links = [
        value
        for e in root.iter()
        for name, value in e.items()
        if name.endswith("href") or name == "clip-path"
    ]
    assert links
    assert {link.removeprefix("url(").strip("#)") for link in links} <= ids[0]
