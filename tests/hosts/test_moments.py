"""Averages of gradients become those of merged layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from esper.hosts.moments import Averages


def stepped(steps: int, layer: nn.Linear) -> torch.optim.AdamW:
    """Returns an optimizer after ``steps`` steps of a layer whose gradient stays the same."""
    optimizer = torch.optim.AdamW(layer.parameters(), 0.0)
    for _ in range(steps):
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    return optimizer


def test_averages_of_few_steps_are_scaled_to_the_steps_of_their_layer() -> None:
    layer, units = nn.Linear(2, 3, bias=False), nn.Linear(2, 1, bias=False)
    averages = Averages([stepped(300, layer), stepped(15, units)])
    assert averages.keys == {"exp_avg", "exp_avg_sq"}
    for key in averages.keys:
        wanted = averages.of(layer.weight, key)
        found = averages.of(units.weight, key)
        assert wanted is not None
        assert found is not None
        scaled = found * averages.factor(units.weight, layer, key)
        torch.testing.assert_close(scaled, wanted[:1])


@pytest.mark.parametrize("steps", [(0, 15), (300, 0)])
def test_averages_of_no_steps_stay_as_they_are(steps: tuple[int, int]) -> None:
    layer, units = nn.Linear(2, 3, bias=False), nn.Linear(2, 1, bias=False)
    averages = Averages([stepped(steps[0], layer), stepped(steps[1], units)])
    assert averages.factor(units.weight, layer, "exp_avg_sq") == 1.0
