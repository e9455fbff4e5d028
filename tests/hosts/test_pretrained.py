"""Configs of models that can be saved note their seeds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from esper.hosts.pretrained import NEEDS, is_note, note_seeds
from esper.hosts.seed_hook import attach, hooks_of, unregister
from tests.hosts.grown_modules import seed_of


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
