"""Seeds that mix positions are found by trying, and refused where they would compute something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.grower.positions import mixes_positions, obstacle
from esper.lifecycle.ramps import BlendOperator
from tests.hosts.grown_modules import seed_of


@pytest.mark.parametrize("topology", ["transformer", "encoder"])
@pytest.mark.parametrize(
    ("name", "operator", "mixes"),
    [
        ("attention", BlendOperator.ADD, True),
        ("lora", BlendOperator.GATE, True),
        ("lora", BlendOperator.MULTIPLY, False),
        ("mlp_small", BlendOperator.ADD, False),
        ("norm", BlendOperator.ADD, False),
    ],
)
def test_mixing_is_measured(topology: str, name: str, operator: BlendOperator, mixes: bool) -> None:
    torch.manual_seed(0)
    seed = seed_of(name, topology, operator)
    assert mixes_positions(seed, torch.randn(2, 5, 8)) is mixes
    assert seed.training
    assert not mixes_positions(seed, torch.randn(2, 1, 8))


class Model(nn.Module):
    def forward(self, batch: dict[str, Tensor], attention_mask: Tensor | None = None) -> None:
        """Nothing is computed."""


class Generates(Model):
    def can_generate(self) -> bool:
        return True


MASK = torch.tensor([[1, 1], [1, 0]])


@pytest.mark.parametrize(
    ("arguments", "keywords", "padded"),
    [
        (({},), {}, False),
        (({}, MASK), {}, True),
        (({},), {"attention_mask": MASK}, True),
        (({"attention_mask": MASK},), {}, True),
        (({"src_key_padding_mask": MASK == 0},), {}, True),
        (({"attention_mask": torch.ones(2, 2)},), {}, False),
        (({"attention_mask": MASK[:, None]},), {}, False),
        (({"labels": MASK},), {}, False),
    ],
)
def test_a_mask_counts_if_it_hides_something(arguments: Any, keywords: dict[str, Any], padded: bool) -> None:
    found = obstacle(Model(), "encoder", (arguments, keywords))
    assert found == ("batches are padded, and the seed does not see the mask" if padded else None)


def test_a_part_that_generates_counts_for_causal_seeds() -> None:
    model = nn.ModuleDict({"inner": Generates()})
    assert "cache" in str(obstacle(model, "transformer", None))
    assert obstacle(model, "encoder", None) is None
