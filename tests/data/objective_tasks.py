"""A small task with a loss and a score of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import esper

X = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :1] - X[:, 1:2]


def task(
    loss: Any = "mse", y: Tensor = Y, outputs: int = 1, score: Any = "r2", **fields: Any
) -> esper.Task:
    def build() -> esper.hosts.graft.GraftedHost:
        return esper.graft(
            nn.Sequential(nn.Linear(6, 4), nn.Linear(4, outputs)), {"r0c0": "0"}, "mlp"
        )

    splits = [
        esper.Split(X[rows], y[rows])
        for rows in (slice(0, 64), slice(64, 80), slice(80, 96))
    ]
    return esper.Task(
        "mine", None, build, *splits, batch_size=16, loss=loss, score=score, **fields
    )
