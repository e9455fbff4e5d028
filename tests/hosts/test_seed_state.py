"""A state with seeds is loaded into networks that have none, or others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import esper
from esper.hosts.seed_hook import hooks_of
from esper.hosts.seed_state import RECIPE, add_seed, add_seeds, take_seeds
from tests.grower.loops import Loop, X, net


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(X)  # type: ignore[no-any-return]


@pytest.mark.parametrize("epochs", [1, 5, 8, 12])
def test_a_state_of_any_moment_gives_the_outputs_of_that_moment(epochs: int) -> None:
    """Before a seed is on, half blended in, at its target, and kept."""
    loop = Loop().run(epochs)
    state: dict[str, Any] = copy.deepcopy(loop.model.state_dict())
    add_seeds(loop.model, state)
    wanted = outputs(loop.model)
    loop.run()
    assert loop.grower is not None
    for other in (net(1), loop.grower.finish()):
        arriving = dict(state)
        take_seeds(other, arriving, make=True)
        other.load_state_dict(arriving)
        assert torch.equal(outputs(other), wanted)


def test_a_state_without_its_seeds_is_that_of_the_model() -> None:
    loop = Loop().run(8)
    own = list(loop.model.state_dict())
    state: dict[str, Any] = dict(loop.model.state_dict())
    add_seeds(loop.model, state)
    assert any(key.endswith(RECIPE) for key in state)
    take_seeds(loop.model, state, make=False)
    assert list(state) == own


def test_a_recipe_that_cannot_be_followed_is_refused() -> None:
    recipe = {
        "path": "body.0",
        "name": "a",
        "alpha": 1.0,
        "topology": "mlp",
        "style": "LINEAR_ADD",
        "channels": 12,
    }
    with pytest.raises(esper.ConfigError, match="does not say what the seed"):
        add_seed(net(), recipe)
    with pytest.raises(
        esper.ConfigError, match=r"unknown blueprint 'mine' .*register it first"
    ):
        add_seed(net(), {**recipe, "blueprint": "mine"})
    with pytest.raises(esper.ConfigError, match="has no nothing: load it by the class"):
        add_seed(net(), {**recipe, "blueprint": "lora", "path": "nothing"})
    model = net()
    add_seed(model, {**recipe, "blueprint": "lora"})
    assert [path for path, _, _ in hooks_of(model)] == ["body.0"]
