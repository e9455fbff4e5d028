from __future__ import annotations

import numpy as np
import pytest

from esper.exam.made import ROWS, made_images, made_table


@pytest.mark.parametrize("seed", range(12))
def test_a_table_is_finite_and_has_several_classes(seed: int) -> None:
    x, y = made_table(seed)
    assert len(x) == len(y) == ROWS
    assert np.isfinite(x).all()
    assert len(np.unique(y)) > 1


@pytest.mark.parametrize("seed", range(12))
def test_images_are_finite_and_have_several_classes(seed: int) -> None:
    x, y = made_images(seed)
    assert x.shape == (ROWS, 8, 8)
    assert np.isfinite(x).all()
    assert len(np.unique(y)) > 2


def test_a_seed_makes_the_same_data_and_another_one_others() -> None:
    for make in (made_table, made_images):
        np.testing.assert_array_equal(make(3)[0], make(3)[0])
        assert make(3)[0].shape != make(4)[0].shape or (make(3)[0] != make(4)[0]).any()
