"""Charts draw the exact values and accept any numbers."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from esper.show import charts
from esper.show.charts import (
    Interval,
    Line,
    Picture,
    draw_line,
    interval_chart,
    line_chart,
)
from esper.telemetry.text import clean, number, p_value


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures of the charts made after this call."""
    figures: list[Figure] = []

    def keep(figure: Figure, _title: str, words: str) -> Picture:
        figures.append(figure)
        return Picture(b"", words)

    monkeypatch.setattr(charts, "picture", keep)
    return figures


def test_unknown_and_non_finite_numbers_become_words() -> None:
    assert number(1234.567) == "1,234.57"
    assert number(0.5, sign=True, unit="pp") == "+0.50 pp"
    assert number(0.000012) == "1.20e-05"
    words = [number(value) for value in (None, math.nan, math.inf, -math.inf)]
    assert words == ["not measured", "not a number", "infinite", "minus infinite"]


def test_a_p_value_is_never_zero() -> None:
    assert [p_value(p) for p in (0.0, 5e-5, 0.0213)] == [
        "< 0.0001",
        "< 0.0001",
        "0.0213",
    ]
    assert (p_value(0.0, "= "), p_value(0.5, "= ")) == ("< 0.0001", "= 0.5000")


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
    _, words = line_chart("title", lines, "epochs done", "accuracy, %")
    (axes,) = figures[0].axes
    first, second = axes.lines
    assert list(first.get_xdata()) == [0, 1, 2, 3]
    assert [str(y) for y in first.get_ydata()] == [
        "1.0",
        "2.0",
        "nan",
        "4.0",
    ]  # NaN lifts the pen
    assert (first.get_linestyle(), second.get_linestyle()) == ("-", "--")
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epochs done", "accuracy, %")
    assert [text.get_text() for text in figures[0].legends[0].get_texts()] == [
        "a",
        "baseline",
    ]
    assert len(axes.collections) == 1  # the band
    assert words == "a ends at 4.00; baseline ends at 1.00"


def test_each_value_has_a_row_with_its_interval_if_that_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figures = drawn(monkeypatch)
    rows = [
        Interval("a", 1.0, 0.5, 3.0),
        Interval("b", 2.0, None, None),
        Interval("c", 4.0, -math.inf, 5.0),
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


@settings(max_examples=2, deadline=None)
@given(
    st.lists(st.tuples(anything, anything, anything, anything), min_size=1, max_size=8)
)
def test_any_numbers_can_be_drawn(
    rows: list[tuple[float, float, float, float]],
) -> None:
    x, y, low, high = ([row[place] for row in rows] for place in range(4))
    pictures = [
        line_chart("t", [Line("a", x, y, 0, low, high)], "x", "y"),
        interval_chart("t", [Interval("a", *row[:3]) for row in rows], "x"),
    ]
    for picture in pictures:
        for element in ElementTree.fromstring(picture.svg).iter():
            for name in ("d", "x", "y", "width", "height", "transform"):
                assert not {"nan", "inf"} & set(
                    (element.get(name) or "").lower().split()
                ), element.attrib


def test_a_chart_is_the_same_picture_each_time_and_names_are_text() -> None:
    lines = [Line("a <b> $x$", [0, 1], [1.0, 2.0], 0), Line("b", [0, 1], [1.0, 3.0], 1)]
    one, again = (line_chart("one", lines, "x", "y") for _ in range(2))
    assert one == again  # neither dates nor random ids
    texts = ElementTree.fromstring(one.svg).iter("{http://www.w3.org/2000/svg}text")
    assert "a <b> $x$" in {text.text for text in texts}


SCRIPT = """
import os
{before}
from esper.show.charts import Line, chart_style, line_chart
picture = line_chart("a", [Line("b", [1, 2], [1, 2])], "x", "y")
assert picture.svg.startswith(b"<?xml"), picture.svg[:50]
import matplotlib
{after}
print(len(picture.svg))
"""
SURROUNDINGS = {
    "nothing": ({}, "", ""),
    "a backend that is not installed": (
        {"MPLBACKEND": "module://not_installed.backend_inline"},
        "",
        "assert os.environ['MPLBACKEND'].startswith('module://not')",
    ),
    "a backend with a window": ({"MPLBACKEND": "TkAgg"}, "", ""),
    "an empty backend": ({"MPLBACKEND": ""}, "", ""),
    "the caller's own backend": (
        {"MPLBACKEND": "pdf"},
        "",
        "assert matplotlib.rcParams['backend'] == 'pdf'",
    ),
    "a style": (
        {},
        "import matplotlib\nmatplotlib.rcParams.update({'figure.dpi': 300, "
        "'axes.labelsize': 30, 'text.usetex': True, 'axes.grid': False, "
        "'savefig.transparent': True, 'lines.linewidth': 9})",
        "assert matplotlib.rcParams['axes.labelsize'] == 30",
    ),
}


def sizes_of(surroundings: str) -> str:
    variables, before, after = SURROUNDINGS[surroundings]
    environment = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}
    code = SCRIPT.format(before=before, after=after)
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **variables},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.mark.slow
@pytest.mark.parametrize("surroundings", list(SURROUNDINGS)[1:])
def test_charts_are_the_same_whatever_the_user_has_set_for_matplotlib(
    surroundings: str,
) -> None:
    assert sizes_of(surroundings) == sizes_of("nothing")


def test_the_users_style_neither_changes_a_chart_nor_is_changed() -> None:
    plain = line_chart("a", [Line("b", [1, 2], [1, 2])], "x", "y")
    with matplotlib.rc_context({"lines.linewidth": 9, "grid.linewidth": 7}):
        styled = line_chart("a", [Line("b", [1, 2], [1, 2])], "x", "y")
        assert matplotlib.rcParams["lines.linewidth"] == 9
    assert styled == plain


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("color", [0, -1])
def test_points_that_cannot_be_compared_are_not_joined(
    connected: bool, color: int
) -> None:
    axes = Figure().add_subplot()
    draw_line(axes, Line("a", [1, 2], [1.0, 2.0], color, connected=connected))
    (drawn,) = axes.lines
    assert (drawn.get_linestyle() == "None") != connected
    assert connected or drawn.get_marker() not in ("", "None")
