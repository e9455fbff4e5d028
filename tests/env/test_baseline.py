"""The no-growth baseline."""

import math

import numpy as np
import pytest

from esper.env.state import Baseline

BASELINE = Baseline(
    accuracy=(10.0, 60.0, 80.0), loss=(2.0, 1.0, 0.6), final_loss_std=0.05, episodes=8
)


def test_a_lower_loss_is_worth_the_accuracy_that_hosts_left_alone_gained_by_it() -> (
    None
):
    """Their accuracy rose by 70 pp while their loss fell by 1.4: 50 pp per unit of loss."""
    losses = np.array([0.6, 0.5, 0.7, 2.0])
    assert BASELINE.gain_by_loss(losses) == pytest.approx([0.0, 5.0, -5.0, -70.0])


def test_a_network_that_is_broken_is_as_bad_as_an_untrained_one() -> None:
    assert BASELINE.gain_by_loss(np.array([5.0, math.inf, math.nan])) == pytest.approx(
        [-70.0] * 3
    )


def test_a_loss_that_never_moved_is_worth_nothing() -> None:
    still = Baseline(
        accuracy=(10.0, 60.0), loss=(2.0, 2.0), final_loss_std=0.05, episodes=8
    )
    assert still.gain_by_loss(np.array([1.0])) == 0.0
