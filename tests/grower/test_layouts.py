"""Layouts that are inferred before anything is planted, and seeds that mix positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import esper
from esper.config import ConfigError
from esper.core.blueprints import BLUEPRINTS
from esper.core.place import Place
from esper.core.ramps import BlendOperator
from esper.core.site import seed_of as seed_at
from esper.core.state import Choices
from esper.grower.backend import mixes_positions, obstacle
from tests.grower.loops import LENIENT, Loop, net
from tests.hosts.grown_modules import seed_of


class OnlyInTraining(nn.Module):
    """A user's: it cannot run on its training batches in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and len(x) == 16:
            raise RuntimeError("no batch of training in eval mode")
        return self.inner(x)  # type: ignore[no-any-return]


def known(loop: Loop) -> Choices:
    """The sizes of the model and the seeds, known after the first epoch."""
    loop.run(1)
    assert loop.grower.env is not None
    return loop.grower.env.choices


def test_the_operations_of_the_model_and_of_seeds_are_those_of_their_weights() -> None:
    choices = known(Loop())
    assert choices.host_flops == sum(
        2 * p.numel() for p in net().parameters() if p.dim() == 2
    )
    assert choices.flops.shape == choices.parameters.shape
    assert (choices.flops < 2 * choices.parameters).all()
    assert choices.flops.any()


def test_a_loop_that_is_resumed_knows_what_was_counted() -> None:
    first = Loop()
    counted = known(first)
    state = first.grower.state_dict()
    other = Loop()
    other.grower.load_state_dict(state)
    assert other.grower.env is not None
    assert other.grower.env.choices.host_flops == counted.host_flops
    np.testing.assert_array_equal(other.grower.env.choices.flops, counted.flops)


def test_operations_that_cannot_be_counted_are_unknown_and_no_price() -> None:
    sites = {"r0c0": "inner.body.0"}
    assert known(Loop(model=OnlyInTraining(), sites=sites)).host_flops == 0
    config = LENIENT.with_values(reward={"rent_in": "flops"})
    with pytest.raises(
        ConfigError, match=r"not known, so reward.rent_in must be parameters"
    ):
        Loop(model=OnlyInTraining(), sites=sites, config=config).run(1)


def test_a_model_that_cannot_run_in_eval_mode_needs_a_topology() -> None:
    sites = {"r0c0": "inner.body.0"}
    with pytest.raises(
        esper.ConfigError,
        match=r"which fails: .*no batch of training in eval mode.*if topology= says",
    ):
        Loop(model=OnlyInTraining(), sites=sites, topology=None).run(1)
    assert Loop(model=OnlyInTraining(), sites=sites, topology="mlp").run(1).steps


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
