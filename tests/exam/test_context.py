from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.data.split import Split
from esper.exam.context import (
    REGION,
    VALIDATION,
    Context,
    Law,
    task_of,
)
from esper.exam.sources import load_source

IMAGES = Context("digits", width=3, samples=60, epochs=4, price=1.0, key=7)
TABLE = Context("made_table_1", width=5, samples=60, epochs=4, price=1.0, key=7)


@pytest.mark.parametrize("context", [IMAGES, TABLE], ids=["cnn", "mlp"])
def test_parameters_are_those_of_the_host_at_each_width(context: Context) -> None:
    for factor in context.factors:
        host = task_of(context, factor).new_host()
        assert context.parameters(factor) == sum(p.numel() for p in host.parameters())


def rows(context: Context) -> dict[str, Split]:
    task = task_of(context)
    assert isinstance(task.train, Split)
    return {"train": task.train, "validation": task.validation, "test": task.test}


def test_splits_have_their_sizes_and_no_row_in_common() -> None:
    splits = rows(IMAGES)
    assert len(splits["train"]) == 60
    assert len(splits["validation"]) == VALIDATION
    seen = [tuple(x.flatten().tolist()) for split in splits.values() for x in split.x]
    assert len(set(seen)) >= len(seen) - 2  # a few digits are there twice


def test_noise_changes_labels_of_training_rows_only() -> None:
    clean, noisy = rows(IMAGES), rows(replace(IMAGES, noise=0.5))
    differ = {
        name: float((clean[name].y != noisy[name].y).float().mean()) for name in clean
    }
    assert 0.3 < differ["train"] < 0.6
    assert differ["validation"] == differ["test"] == 0
    assert torch.equal(clean["train"].x, noisy["train"].x)


def test_inputs_are_scaled_by_the_training_rows() -> None:
    x = rows(TABLE)["train"].x
    torch.testing.assert_close(x.mean(dim=0), torch.zeros(x.shape[1]), atol=0.1, rtol=0)


def test_a_key_chooses_other_rows() -> None:
    assert not torch.equal(
        rows(IMAGES)["train"].x, rows(replace(IMAGES, key=8))["train"].x
    )


def test_draws_stay_out_of_the_region() -> None:
    rng = np.random.default_rng(0)
    law = Law(("digits", "made_table_1"))
    drawn = [law.draw(rng) for _ in range(200)]
    assert not any(REGION.touches(context) for context in drawn)
    assert {context.topology for context in drawn} == {"cnn", "mlp"}
    assert {context.optimizer for context in drawn} == {"sgd", "adamw"}


def test_no_context_asks_for_more_rows_than_its_source_has() -> None:
    rng = np.random.default_rng(1)
    law = Law(("digits",), samples=(40, 100_000), left_out=None)
    most = len(load_source("digits").y)
    for context in (law.draw(rng) for _ in range(50)):
        assert context.samples + VALIDATION < most
        assert len(task_of(context).test) > 0
