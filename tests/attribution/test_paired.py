"""Differences of two configurations on the same samples, and their standard errors."""

from __future__ import annotations

import numpy as np
import pytest

from esper.attribution.paired import paired


def test_the_error_of_one_target_per_sample_is_that_of_a_mean() -> None:
    d = np.random.default_rng(0).integers(-1, 2, 200).astype(np.float64)
    found = paired(d, np.ones(200))
    assert found.difference == pytest.approx(100 * d.mean())
    assert found.error == pytest.approx(100 * d.std(ddof=1) / np.sqrt(200))


def test_samples_with_more_targets_weigh_more() -> None:
    """Ratio 2 / 10; residuals 1 - 1.6 and 1 - 0.4, so the error is sqrt(2 / 1 · (0.36 + 0.36)) / 10."""
    found = paired(np.array([1.0, 1.0]), np.array([8.0, 2.0]))
    assert found.difference == pytest.approx(20)
    assert found.error == pytest.approx(12)


def test_equal_shares_of_right_targets_have_no_error() -> None:
    assert paired(
        np.array([2.0, 1.0, 4.0]), np.array([4.0, 2.0, 8.0])
    ).error == pytest.approx(0)
