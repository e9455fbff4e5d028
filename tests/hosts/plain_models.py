"""A small network as a user writes one, and a task of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import esper

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(96, 6, generator=GENERATOR)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def splits(x: Tensor = X, y: Tensor = Y) -> list[esper.Split]:
    return [
        esper.Split(x[rows], y[rows])
        for rows in (slice(0, 64), slice(64, 80), slice(80, 96))
    ]


def task_of(
    make: Callable[[], nn.Module], site: str, topology: str = "mlp", **data: Tensor
) -> esper.Task:
    return esper.Task(
        "mine",
        3,
        lambda: esper.graft(make(), {"r0c0": site}, topology),
        *splits(**data),
        batch_size=16,
    )


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.relu(self.first(x)))


def double() -> nn.Module:
    return Plain().double()
