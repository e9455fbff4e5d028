from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from esper.config import ConfigError
from esper.exam.sources import FOLDER, load_source


@pytest.fixture(autouse=True)
def no_cache() -> None:
    load_source.cache_clear()


def test_digits_are_small_images_in_a_fixed_random_order() -> None:
    source = load_source("digits")
    assert source.images
    assert source.x.shape == (1_797, 8, 8)
    assert source.classes == 10
    assert len(np.unique(source.y[:100])) == 10


def test_a_change_keeps_the_classes_of_images_or_their_pixels() -> None:
    plain, permuted, parity = map(
        load_source, ("digits", "digits_permuted", "digits_parity")
    )
    np.testing.assert_array_equal(plain.y, permuted.y)
    np.testing.assert_allclose(np.sort(plain.x[0].flat), np.sort(permuted.x[0].flat))
    np.testing.assert_array_equal(plain.y % 2, parity.y)


def test_classes_are_counted_from_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path))
    (tmp_path / FOLDER).mkdir()
    np.savez(tmp_path / FOLDER / "vowel.npz", x=np.eye(4), y=np.array([3, 7, 7, 9]))
    assert sorted(load_source("vowel").y) == [0, 1, 1, 2]


def test_a_missing_table_says_what_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESPER_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match=r"uci_tables\.py"):
        load_source("letter")


@pytest.mark.parametrize(
    "name", ["leter", "made_table_x", "made_images_", "digits_upside_down"]
)
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown source"):
        load_source(name)
