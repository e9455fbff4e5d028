"""The no-growth baseline, measured on hosts left alone."""

from __future__ import annotations

import numpy as np
import pytest

from esper.core.state import MIN_STD, Baseline
from esper.data.task import resolve
from esper.env.no_growth import FIRST_INDEX, measure_baseline
from esper.training.execution.workers import WorkerExecutor
from tests.core_helpers import digits, rig, tiny_config

HORIZON = 3


def measured(hosts: int, run_seed: int = 4) -> Baseline:
    config = resolve(
        tiny_config(horizon=HORIZON, env={"baseline_episodes": hosts}), digits()
    )
    with WorkerExecutor(1) as executor:
        return measure_baseline(
            [digits()],
            config,
            executor,
            run_seed,
        )


def test_curves_start_at_the_untrained_host() -> None:
    found = measured(2)
    assert found.episodes == 2
    assert len(found.accuracy) == len(found.loss) == HORIZON + 1
    assert found.loss[0] > found.loss[-1]


def test_curves_are_means_of_hosts_and_the_spread_is_that_of_their_last_losses() -> (
    None
):
    both, alone = measured(2), measured(1)
    second = 2 * np.array(both.loss) - np.array(alone.loss)
    assert both.final_loss_std == pytest.approx(
        abs(alone.loss[-1] - second[-1]) / np.sqrt(2)
    )
    assert alone.final_loss_std == MIN_STD
    assert measured(2) == both
    assert measured(2, run_seed=5) != both


def test_no_env_of_a_run_plays_a_host_of_the_baseline() -> None:
    assert FIRST_INDEX > 10**5
    with rig(horizon=HORIZON, run={"seed": 4}) as world:
        for _ in range(HORIZON):
            world.step()
        assert float(world.env.state.loss[0]) != measured(1).loss[-1]


def test_the_accuracy_by_class_is_that_of_the_last_epoch() -> None:
    found = measured(2)
    shares = np.bincount(digits().validation.y) / len(digits().validation)
    assert shares @ found.class_accuracy == pytest.approx(found.accuracy[-1])
