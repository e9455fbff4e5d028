"""Grown models of transformers: saved and loaded, generating with a cache, and with padding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn

import esper

pytest.importorskip("transformers")
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from esper.core.action import Op
from esper.core.blueprints.adapted import rank_of
from esper.integrations.pretrained import from_pretrained
from tests.grower.loops import LENIENT, do, plant, script

IDS = torch.randint(3, 50, (4, 12), generator=torch.Generator().manual_seed(0))
GROW = {
    1: do(Op.ADVANCE, "r0c0"),
    4: do(Op.ADVANCE, "r0c0"),
    8: do(Op.ADVANCE, "r0c0"),
    9: do(Op.FOSSILIZE, "r0c0"),
}


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=50, num_key_value_heads=2, pad_token_id=0, **sizes)
    )


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    )


PATHS = {llama: "model.layers.0", gpt2: "transformer.h.0"}


def grown(
    make: Any, blueprint: str = "mlp_small", epochs: int = 12, **inputs: Any
) -> tuple[Any, esper.Grower]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    controller = script({0: plant("r0c0", blueprint), **GROW})
    grower = esper.Grower(
        model,
        {"r0c0": PATHS[make]},
        optimizer,
        controller,
        epochs,
        topology="transformer",
        config=LENIENT,
    )
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS, **inputs).loss.backward()
        optimizer.step()
        grower.step(lambda _model: 0.5)
    return model, grower


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_saved_model_is_loaded_with_its_seeds_and_never_without(
    make: Any, tmp_path: Path
) -> None:
    model, grower = grown(make)
    assert grower.kept == {"r0c0": "mlp_small"}
    network: Any = grower.finish()
    for name, saved in (("grown", network), ("plain", esper.plain(network, IDS))):
        saved.eval().save_pretrained(tmp_path / name)
        for kind in (type(model), AutoModelForCausalLM, AutoModel):
            with pytest.raises(ValueError, match="quant"):
                kind.from_pretrained(tmp_path / name)
        for kind in (type(model), AutoModelForCausalLM):
            back = from_pretrained(kind, tmp_path / name).eval()
            assert type(back) is type(model)
            assert torch.equal(back(IDS).logits, network(IDS).logits)
        back.save_pretrained(tmp_path / f"{name} again")
        half = from_pretrained(
            type(model), tmp_path / f"{name} again", dtype=torch.bfloat16
        )
        assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
        with pytest.raises(
            esper.ConfigError, match="load it by the class of the saved model"
        ):
            from_pretrained(AutoModel, tmp_path / name)


def test_a_model_that_has_not_grown_is_loaded_as_always(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(esper.ConfigError, match="nothing has grown in"):
        from_pretrained(LlamaForCausalLM, tmp_path)


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("blueprint", ["mlp_small", "lora", "attention"])
def test_generation_with_a_cache_equals_generation_without(
    make: Any, blueprint: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A seed that mixes positions is not planted, and the reason is said."""
    network, grower = grown(make, blueprint)
    kept = grower.kept
    grower.finish().eval()
    assert kept == ({} if blueprint == "attention" else {"r0c0": blueprint})
    if not kept:
        assert "it mixes positions, and the model generates with a cache" in caplog.text
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with_cache, without = (
        network.generate(IDS[:2, :6], use_cache=cache, **options)
        for cache in (True, False)
    )
    assert torch.equal(with_cache, without)


class Mixed(PyTorchModelHubMixin, nn.Module):
    """A model with huggingface_hub's mixin, as those of segmentation-models-pytorch: its config is a dict."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body, self.head = (
            nn.Sequential(nn.Linear(width, width), nn.ReLU()),
            nn.Linear(width, 2),
        )
        self.config = {"width": width}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def test_a_model_whose_config_cannot_name_seeds_warns_that_they_would_be_left_out() -> (
    None
):
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    controller = script({0: plant("r0c0"), **GROW})
    grower = esper.Grower(model, ["body"], optimizer, controller, 14, config=LENIENT)
    x = torch.randn(4, 8)
    for _ in range(11):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        grower.step(lambda _model: 0.5)
    with pytest.warns(UserWarning, match="from_pretrained.. would leave them out"):
        grower.finish()


WIDEN = {
    gpt2: "transformer.h.{}.mlp.c_fc -> transformer.h.{}.mlp.c_proj",
    llama: "model.layers.{}.mlp -> model.layers.{}.mlp",
}
LORA = {
    gpt2: "transformer.h.1.attn.c_attn -> transformer.h.1.attn.c_attn",
    llama: "model.layers.1.self_attn.q_proj -> model.layers.1.self_attn.q_proj",
}


def merged(make: Any, sites: dict[str, str], plants: dict[int, Any]) -> Any:
    """A model whose seeds have all become parts of its layers."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    config = LENIENT.with_values(env={"at_once": True})
    grower = esper.Grower(
        model,
        sites,
        optimizer,
        script(plants),
        4,
        topology="transformer",
        config=config,
    )
    for _ in range(4):
        model.train()
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        grower.step(lambda model: float(-model.eval()(IDS, labels=IDS).loss))
    return grower.finish(merge=True).eval()


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_model_whose_seeds_have_all_merged_is_saved_as_an_ordinary_one(
    make: Any, tmp_path: Path
) -> None:
    network = merged(make, {"r3c0": LORA[make]}, {0: plant("r3c0", "lora_2")})
    network.save_pretrained(tmp_path)
    back = type(network).from_pretrained(tmp_path).eval()
    assert torch.equal(back(IDS).logits, network(IDS).logits)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_config_of_a_merged_model_has_the_width_that_all_its_blocks_have(
    make: Any, tmp_path: Path
) -> None:
    sites = {f"r2c{n}": WIDEN[make].format(n, n) for n in range(2)}
    plants = {n: plant(f"r2c{n}", "widen_half") for n in range(2)}
    network = merged(make, sites, plants)
    network.save_pretrained(tmp_path)
    back = type(network).from_pretrained(tmp_path).eval()
    assert torch.equal(back(IDS).logits, network(IDS).logits)


def test_blocks_of_different_widths_are_refused_by_others_and_loaded_by_esper(
    tmp_path: Path,
) -> None:
    network = merged(
        gpt2, {"r2c0": WIDEN[gpt2].format(0, 0)}, {0: plant("r2c0", "widen_half")}
    )
    network.save_pretrained(tmp_path)
    with pytest.raises((RuntimeError, ValueError)):
        GPT2LMHeadModel.from_pretrained(tmp_path)
    back = from_pretrained(GPT2LMHeadModel, tmp_path).eval()
    assert torch.equal(back(IDS).logits, network(IDS).logits)
    back.save_pretrained(tmp_path / "again")
    again = from_pretrained(GPT2LMHeadModel, tmp_path / "again").eval()
    assert torch.equal(again(IDS).logits, network(IDS).logits)


def test_a_kept_seed_beside_wider_layers_is_saved_with_both(tmp_path: Path) -> None:
    def wider() -> Any:
        sites = {"r2c0": WIDEN[gpt2].format(0, 0)}
        return merged(gpt2, sites, {0: plant("r2c0", "widen_half")})

    PATHS[wider] = PATHS[gpt2]
    _, grower = grown(wider)
    network: Any = grower.finish().eval()
    network.save_pretrained(tmp_path)
    back = from_pretrained(GPT2LMHeadModel, tmp_path).eval()
    assert torch.equal(back(IDS).logits, network(IDS).logits)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_frozen_model_is_saved_with_the_ranks_that_have_grown(
    make: Any, tmp_path: Path
) -> None:
    model = make()
    model.base_model.requires_grad_(False)
    grower = esper.Grower(
        model,
        {"r3c0": LORA[make]},
        torch.optim.AdamW(model.parameters(), 1e-2),
        script({0: plant("r3c0", "lora_2"), 2: plant("r3c0", "lora_2")}),
        6,
        topology="transformer",
        config=LENIENT.with_values(env={"at_once": True}),
        merge=True,
    )
    for _ in range(6):
        model.train()
        model.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        grower.groups.optimizer.step()
        grower.step(lambda model: float(-model.eval()(IDS, labels=IDS).loss))
    network: Any = grower.finish().eval()
    layer = network.get_submodule(LORA[make].split()[0])
    assert rank_of(layer) == 4
    assert torch.equal(copy.deepcopy(network)(IDS).logits, network(IDS).logits)
    network.save_pretrained(tmp_path)
    with pytest.raises((RuntimeError, ValueError)):
        type(network).from_pretrained(tmp_path)
    back = from_pretrained(type(network), tmp_path).eval()
    assert torch.equal(back(IDS).logits, network(IDS).logits)
