"""Seeds in saved states, and in the configs of models of Hugging Face."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper.hosts.seed_hook import attach, hooks_of, unregister
from esper.hosts.seed_state import (
    NEEDS,
    RECIPE,
    add_seed,
    add_seeds,
    is_note,
    note_seeds,
    take_seeds,
)
from tests.grower.loops import Loop, X, net
from tests.hosts.grown_modules import seed_of


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(X)  # type: ignore[no-any-return]


@pytest.mark.parametrize("epochs", [5, pytest.param(12, marks=pytest.mark.slow)])
def test_a_state_of_any_moment_gives_the_outputs_of_that_moment(epochs: int) -> None:
    """While a seed is half blended in, and when it is kept."""
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


class Pretrained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config: Any = SimpleNamespace()
        self.inner = nn.Linear(8, 8)
        self.inner.config = self.config  # a part shares the config
        self.inner.save_pretrained = self.save_pretrained

    def save_pretrained(self) -> None:
        """As those of Hugging Face."""


def test_seeds_are_noted_once_with_paths_from_the_outermost_model_and_go_with_the_seeds() -> (
    None
):
    model = Pretrained()
    wrapper = nn.ModuleDict({"net": model})
    attach(wrapper, {"net.inner": ("r0c0", seed_of("lora"), 0.5)})
    [(_, _, hook)] = hooks_of(model)
    hook.recipe = {"blueprint": "lora"}
    note_seeds(wrapper)
    note = model.config.quantization_config
    assert note == {
        "needs": NEEDS,
        "seeds": [{"path": "inner", "name": "r0c0", "alpha": 0.5, "blueprint": "lora"}],
        "shapes": {},
    }
    assert is_note(note)
    unregister(model, hook)
    note_seeds(wrapper)
    assert not hasattr(model.config, "quantization_config")


def test_the_config_of_a_quantized_model_stays() -> None:
    model = Pretrained()
    model.config.quantization_config = {"quant_method": "gptq"}
    attach(model, {"inner": ("r0c0", seed_of("lora"), 0.5)})
    note_seeds(model)
    assert model.config.quantization_config == {"quant_method": "gptq"}
