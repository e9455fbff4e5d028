"""The sections of a run in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from esper.show.screen import ASCII_BLOCKS, BLOCKS, picture, plain, section, spark, text
from tests.show.page_helpers import viewed
from tests.telemetry.sample_events import completed, epoch, started


def shown(*events: object, ascii_only: bool = False) -> str:
    view = viewed(*events)  # type: ignore[arg-type]
    return plain(picture(view, 80, ascii_only, []))


def test_the_difference_is_that_to_the_hosts_left_alone() -> None:
    lines = shown(started(), epoch(0, 3), epoch(2, 3), epoch(0, 4)).splitlines()
    assert lines[0].startswith("accuracy ")
    assert lines[0].endswith(" 72.0 % grown, epoch 4, validation: +12.0 pp")
    assert lines[1].endswith(" 60.0 % without growth")


@pytest.mark.parametrize(
    ("values", "line"),
    [([0.0, 3.5, 7.0], "▁▅█"), ([7.0, float("nan")], "█▁"), ([], "")],
)
def test_blocks_are_as_high_as_the_values(values: Sequence[float], line: str) -> None:
    assert spark(values, 8, 0.0, 7.0) == line
    assert len(spark(list(range(100)), 8, 0, 99)) == 8


def test_a_terminal_without_blocks_gets_letters() -> None:
    events = (started(), completed(1), completed(2))
    assert set(shown(*events)) & set(BLOCKS)
    letters = shown(*events, ascii_only=True)
    assert letters.isascii()
    assert ASCII_BLOCKS[-1] in letters


def test_the_view_of_a_pipe_repeats_no_heading_and_has_no_empty_one() -> None:
    (block,) = section("time", [text("10 s"), text("[red]20 s")])
    assert plain(block) == "time         10 s\n             [red]20 s"

    assert section("memory", []) == []


def test_a_name_with_colons_is_no_emoji() -> None:
    assert plain("checkpoint:v: 20 s") == "checkpoint:v: 20 s"
