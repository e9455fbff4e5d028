"""Sizes, samples and bars of the case `train-epoch`."""

from __future__ import annotations

import pytest
import torch

from esper.bench import train_epoch

CPU = torch.device("cpu")


def test_bars_are_set_at_sizes_that_are_measured() -> None:
    size = (4, 128, 8)
    assert train_epoch.BARS["cpu", size] == 2.5
    assert train_epoch.BARS["cuda", (8, 128, 8)] == 1.0
    assert train_epoch.samples_of(size, CPU, quick=False) == 5120
    assert train_epoch.SIZES.default[0] == size
    assert len(set(train_epoch.SIZES.sweep)) == 24
    assert {device_size[1] for device_size in train_epoch.BARS} <= set(
        train_epoch.SIZES.sweep
    )


@pytest.mark.parametrize("size", train_epoch.SIZES.sweep)
@pytest.mark.parametrize("quick", [True, False])
def test_an_epoch_consists_of_full_batches(
    size: tuple[int, int, int], quick: bool
) -> None:
    samples = train_epoch.samples_of(size, CPU, quick)
    assert samples % size[1] == 0
    assert samples >= size[1] * (1 if quick else 2)
