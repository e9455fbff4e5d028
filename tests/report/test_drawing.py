"""Scales, lines, bars and lanes: where things are drawn, and that any numbers can be."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.report.bars import Interval, grouped, interval_chart, stacked_bars
from esper.report.charts import Line, Plot, Point, line_chart, scatter_chart
from esper.report.read import Run
from esper.report.svg import Ids, Scale, span, tag, tick_label
from esper.report.swim_lanes import Life, Stretch, lane_chart, lives
from esper.report.text import clean, number
from esper.telemetry.event import EpochCompleted, StageChanged
from tests.telemetry.sample_events import epoch

PLOT = Plot("title", "description", "x", "y", "pp")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 10.0, [0, 2, 4, 6, 8, 10]),
        (78.2, 91.0, [80, 85, 90]),
        (-0.3, 0.2, [-0.3, -0.2, -0.1, 0.0, 0.1, 0.2]),
        (0.0, 1e-5, [0, 2e-6, 4e-6, 6e-6, 8e-6, 1e-5]),
    ],
)
def test_ticks_are_round_and_within(low: float, high: float, expected: list[float]) -> None:
    assert Scale(low, high, 0, 1).ticks() == pytest.approx(expected)


def test_a_scale_maps_its_ends_to_its_ends() -> None:
    scale = Scale(10, 20, 100, 50)
    assert [scale(10), scale(15), scale(20)] == [100, 75, 50]
    powers = Scale(1, 100, 0, 10, logarithmic=True)
    assert [powers(1), powers(10), powers(100)] == [0, 5, 10]
    assert powers.ticks() == pytest.approx([1, 2, 5, 10, 20, 50, 100])


def test_labels_are_short_and_differ() -> None:
    assert [tick_label(value, 0.5) for value in (0.0, 0.5, 1.0)] == ["0.0", "0.5", "1.0"]
    assert tick_label(2_500_000, 1e5) == "2.5M"
    assert tick_label(1234, 100) == "1,234"


def test_numbers_are_words_where_they_are_none() -> None:
    assert number(1234.567) == "1,234.57"
    assert number(0.5, sign=True, unit="pp") == "+0.50 pp"
    assert number(0.000012) == "1.20e-05"
    assert [number(v) for v in (None, math.nan, math.inf, -math.inf)] == [
        "not measured",
        "not a number",
        "infinite",
        "minus infinite",
    ]


def test_attributes_and_text_are_escaped() -> None:
    assert tag("a", class_='"<&', stroke_width=1.0, gone=None) == '<a class="&quot;&lt;&amp;" stroke-width="1"/>'
    assert clean("a\nb\x07c" + "x" * 300).startswith("a b\N{REPLACEMENT CHARACTER}c")
    assert len(clean("x" * 300)) == 200


def test_a_gap_lifts_the_pen() -> None:
    svg = line_chart(Ids(), PLOT, [Line("a", [0, 1, 2, 3], [1.0, 2.0, math.nan, 4.0], 0)])
    paths = [e.get("d") or "" for e in ElementTree.fromstring(svg) if e.get("class") == "line c0"]
    assert [path.count("M") for path in paths] == [2]


anything = st.floats() | st.sampled_from([0.0, 1e308, -1e308, 5e-324])


@settings(max_examples=60)
@given(st.lists(st.tuples(anything, anything, anything, anything), max_size=8))
def test_any_numbers_can_be_drawn(rows: list[tuple[float, float, float, float]]) -> None:
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], [], []]
    x, y, low, high = columns
    ids = Ids()
    drawn = [
        line_chart(ids, PLOT, [Line("a", x, y, 0, low, high)]),
        scatter_chart(ids, PLOT, [Point(a, b, 0, "p") for a, b in zip(x, y, strict=True)]),
        interval_chart(ids, PLOT, [Interval("a", *row[:3]) for row in rows]),
        stacked_bars(ids, PLOT, [("a", {"b": value, "c": other}) for value, other, _, _ in rows], ["b", "c"]),
    ]
    for svg in drawn:
        for element in ElementTree.fromstring(svg).iter():
            for name in ("d", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height"):
                written = element.get(name, "0")
                assert "nan" not in written
                assert "inf" not in written
                assert "e+" not in written


def test_neighbours_share_a_bar_where_there_are_too_many() -> None:
    found = grouped([{"a": float(i)} for i in range(5)], most=2)
    assert found == [(1, 3, {"a": 1.0}), (4, 5, {"a": 3.5})]
    assert grouped([{"a": 1.0}]) == [(1, 1, {"a": 1.0})]


def change(at: int, before: str, after: str, slot: str = "r0c0") -> StageChanged:
    return StageChanged(
        env=0, episode=0, epoch=at, slot=slot, blueprint="norm", before=before, after=after, cause="advance"
    )


def test_a_lane_holds_every_stage_from_change_to_change(tmp_path: object) -> None:
    changes = [
        change(2, "DORMANT", "GERMINATED"),
        change(3, "GERMINATED", "TRAINING"),
        change(5, "TRAINING", "PRUNED"),
        change(6, "PRUNED", "EMBARGOED"),
        change(8, "EMBARGOED", "DORMANT"),
        change(9, "DORMANT", "GERMINATED"),
        change(4, "DORMANT", "GERMINATED", slot="r0c1"),
    ]
    run = Run.__new__(Run)
    run.events = {StageChanged: changes, EpochCompleted: [epoch(0, number) for number in range(1, 11)]}
    (life,) = lives(run).values()
    told = [(s.slot, s.stage, s.begin, s.end) for s in life.stretches]
    assert told == [
        ("r0c0", "GERMINATED", 2, 3),
        ("r0c0", "TRAINING", 3, 5),
        ("r0c0", "PRUNED", 5, 6),
        ("r0c0", "EMBARGOED", 6, 8),
        ("r0c0", "GERMINATED", 9, 10),
        ("r0c1", "GERMINATED", 4, 10),
    ]


def test_a_lane_is_drawn_to_scale_and_told_in_words() -> None:
    stretches = [
        Stretch("r0c0", stage, "norm", *ends, "why") for stage, ends in (("TRAINING", (0, 10)), ("HOLDING", (10, 30)))
    ]
    svg = ElementTree.fromstring(lane_chart(Ids(), Life(0, 0, 30, stretches, [12]), ["r0c0", "r0c1"], 30, "t"))
    bars = {e.get("class"): e for e in svg if (e.get("class") or "").startswith("stage")}
    short, long = (float(bars[f"stage s-{name}"].get("width") or 0) for name in ("training", "holding"))
    assert long == pytest.approx(2 * short, abs=0.2)
    assert sum(e.get("class") == "empty" for e in svg) == 2  # one lane a slot, used or not
    assert sum(e.get("class") == "rollback" for e in svg) == 1
    words = next(e.text for e in svg if e.tag == "desc")
    assert words == (
        "r0c0: norm training from epoch 0 to 10; r0c0: norm holding from epoch 10 to 30; rollback at epoch 12"
    )


@given(st.lists(st.floats(), max_size=5))
def test_a_span_holds_all_that_can_be_drawn(values: list[float]) -> None:
    low, high = span(values)
    assert low < high
    assert all(low <= value <= high for value in values if math.isfinite(value) and abs(value) < 1e100)
    assert all(a < b for a, b in pairwise(Scale(low, high, 0, 1).ticks()))
