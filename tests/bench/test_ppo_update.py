"""The two updates of the case `ppo-update`."""

from __future__ import annotations

import pytest

from esper.bench import ppo_update
from esper.bench.case import BenchArgs


def test_every_turn_of_the_update_does_the_same_work() -> None:
    pytest.importorskip("sb3_contrib")
    (comparison,) = ppo_update.comparisons(BenchArgs(sizes=((4, 5),)))
    for _ in range(2):
        comparison.run()
        comparison.run_baseline()
    assert comparison.size == "E 4, 5 steps, 4 x 4 minibatches, LSTM 128"
