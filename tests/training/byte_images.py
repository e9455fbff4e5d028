"""The digits as bytes in memory, and hosts with fused blocks, as image tasks have them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from esper.data.split import Split
from esper.data.task import Task
from esper.hosts.cnn import CNNHost
from esper.ops.stage_batch import normalisation_table
from tests.core_helpers import digits


@cache
def _splits(side: int, channels: int) -> tuple[Split, Split, Split]:
    table = normalisation_table([0.3] * channels, [0.35] * channels)
    made = []
    for split in (digits().train, digits().validation, digits().test):
        assert isinstance(split, Split)
        made.append(Split(_bytes(split.x, side, channels), split.y, table))
    return made[0], made[1], made[2]


def _bytes(x: Tensor, side: int, channels: int) -> Tensor:
    """Images of 8×8 numbers as uint8 [N, side, side, channels], every channel a little darker than the last."""
    low, high = float(digits().train.x.min()), float(digits().train.x.max())  # type: ignore[union-attr]
    pixels = ((x - low) / (high - low) * 255).clamp(0, 255).squeeze(1)  # [N, 8, 8]
    pixels = pixels.repeat_interleave(side // 8, 1).repeat_interleave(side // 8, 2)
    return (
        torch.stack([pixels * 0.9**channel for channel in range(channels)], dim=-1)
        .round()
        .to(torch.uint8)
    )


def byte_digits(
    side: int = 8, channels: int = 1, base: int = 8, rows: int = 2, **values: Any
) -> Task:
    """Images of ``side`` × ``side`` pixels, a multiple of 8, for a host of two blocks."""
    train, validation, test = _splits(side, channels)
    return Task(
        name="bytes",
        classes=10,
        build_host=lambda: CNNHost(channels, 10, base=base, blocks=2, rows=rows),
        train=train,
        validation=validation,
        test=test,
        **values,
    )
