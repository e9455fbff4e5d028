"""Rates of whole runs in the case `end-to-end`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from esper.bench import end_to_end
from esper.bench.case import BenchArgs
from esper.bench.runner import measure
from esper.telemetry.sinks.jsonl import JsonlSink
from tests.telemetry.sample_events import completed, cut


def test_rates_cover_all_rounds_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    with closing(JsonlSink(log)) as sink:
        rounds = (
            completed(1, samples=100, epochs=5, seconds=2.0),
            completed(2, samples=300, epochs=10, seconds=3.0),
        )
        for event in (rounds[0], cut(1), rounds[1]):
            sink.handle(event)
    assert end_to_end.rates(log) == (80, 3)


@pytest.mark.slow
def test_both_rows_come_from_the_same_runs() -> None:
    with closing(end_to_end.comparisons(BenchArgs(quick=True))) as found:
        images = measure(next(found), rounds=2)
        steps = measure(next(found), rounds=2)
    assert images.turns == steps.turns == 2
    assert images.value / steps.value == pytest.approx(64)
    assert images.ratio == pytest.approx(steps.ratio)
