"""The embedded task: three disjoint, reproducible splits, and sizes that are checked before a run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from esper.config import ConfigError
from esper.data.tasks import load_task
from esper.hosts.sizes import at_width
from tests.core_helpers import digits

SPLITS = ("train", "validation", "test")


@pytest.mark.trap(24)
def test_the_splits_are_disjoint_and_together_they_are_the_whole_set() -> None:
    task = digits()
    x = torch.cat([getattr(task, name).x for name in SPLITS]).flatten(1).numpy()
    y = torch.cat([getattr(task, name).y for name in SPLITS]).numpy()
    raw = load_digits()
    mean, std = _scale(raw.data, x)
    mine = np.column_stack([np.rint(x * std + mean), y]).astype(np.int64)
    theirs = np.column_stack([raw.data, raw.target]).astype(np.int64)
    # No image is there twice, so that the sorted rows agree only if each is in exactly one split.
    assert len(np.unique(theirs, axis=0)) == len(theirs)
    np.testing.assert_array_equal(_sorted(mine), _sorted(theirs))


def _scale(raw: np.ndarray, x: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation by which raw pixels 0 to 16 were normalised to ``x``, from the extremes."""
    std = (raw.max() - raw.min()) / (x.max() - x.min())
    return float(raw.min() - x.min() * std), float(std)


def _sorted(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.T)]


def test_another_scikit_learn_without_the_table_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("esper.data.digits.find_spec", lambda _name: None)
    with pytest.raises(
        ConfigError, match=r"scikit-learn, which has no datasets/data/digits\.csv\.gz"
    ):
        load_task("digits")


def test_inputs_are_normalised_by_the_training_split_alone() -> None:
    task = digits()
    assert float(task.train.x.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(task.train.x.std()) == pytest.approx(1.0, abs=1e-5)
    assert abs(float(task.test.x.mean())) > 1e-5


def test_rows_are_the_pixels_of_the_same_splits() -> None:
    table, images = load_task("digits_table"), digits()
    for name in ("train", "validation", "test"):
        rows, pixels = getattr(table, name), getattr(images, name)
        assert torch.equal(rows.x, pixels.x.flatten(1))
        assert torch.equal(rows.y, pixels.y)


def test_the_host_is_an_mlp_with_a_slot_after_each_hidden_layer_in_any_width() -> None:
    task = load_task("digits_table")
    sizes = []
    for build in (task.build_host, at_width(task.build_host, 16)):
        host = build()
        host.probe(task.sample)
        assert (host.topology, host.slot_names) == ("mlp", ("r0c0", "r0c1"))
        sizes.append(host.parameter_count)
    assert sizes == [
        64 * 8 + 8 + 8 * 8 + 8 + 8 * 10 + 10,
        64 * 16 + 16 + 16 * 16 + 16 + 16 * 10 + 10,
    ]
    assert f"{sizes[0]:,} parameters" in task.description
