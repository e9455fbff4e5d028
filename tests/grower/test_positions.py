"""Seeds that mix positions are found by trying, and refused where they would compute something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.grower.positions import mixes_positions, obstacle
from esper.lifecycle.ramps import BlendOperator
from esper.seeds.blueprints import BLUEPRINTS
from esper.seeds.place import Place
from esper.seeds.site import seed_of as seed_at
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
def test_mixing_is_measured(
    topology: str, name: str, operator: BlendOperator, mixes: bool
) -> None:
    torch.manual_seed(0)
    seed = seed_of(name, topology, operator)
    place = Place("r0c0", 8, topology=topology)
    assert mixes_positions(seed, torch.randn(2, 5, 8), place) is mixes
    assert seed.training
    assert not mixes_positions(seed, torch.randn(2, 1, 8), place)


def test_positions_of_a_sequence_that_comes_first_are_mixed_too() -> None:
    place = Place("r0c0", 8, topology="encoder", order=(1, 0, 2))
    for name, mixes in (("attention", True), ("mlp_small", False)):
        seed = seed_at(BLUEPRINTS.get("encoder", name), BlendOperator.ADD, place)
        assert mixes_positions(seed, torch.randn(5, 2, 8), place) is mixes


def test_seeds_of_convolutional_networks_are_not_judged_by_it() -> None:
    place = Place("r0c0", 8, topology="cnn1d")
    seed = seed_at(BLUEPRINTS.get("cnn1d", "conv_light"), BlendOperator.ADD, place)
    assert not mixes_positions(seed, torch.randn(2, 8, 5), place)


class Model(nn.Module):
    def forward(
        self, batch: dict[str, Tensor], attention_mask: Tensor | None = None
    ) -> None:
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
def test_a_mask_counts_if_it_hides_something(
    arguments: Any, keywords: dict[str, Any], padded: bool
) -> None:
    found = obstacle(Model(), "encoder", (arguments, keywords))
    assert found == (
        "batches are padded, and the seed does not see the mask" if padded else None
    )


def test_a_part_that_generates_counts_for_causal_seeds() -> None:
    model = nn.ModuleDict({"inner": Generates()})
    assert "cache" in str(obstacle(model, "transformer", None))
    assert obstacle(model, "encoder", None) is None
