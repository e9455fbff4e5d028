"""Models of Hugging Face, made from a config, grow without a wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import esper
from esper.hosts.seed_hook import attach
from tests.grower.loops import LENIENT, plant, script
from tests.hosts.grown_modules import seed_of

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed; see the extra integrations"
)

IDS = torch.randint(1, 20, (64, 6), generator=torch.Generator().manual_seed(0))
MASK = (
    torch.arange(6)
    < torch.randint(2, 7, (64, 1), generator=torch.Generator().manual_seed(1))
).long()
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
LABELS = ((IDS == 3) & (MASK == 1)).any(1).long()


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SMALL, vocab_size=20, max_position_embeddings=8)
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=20,
        n_positions=8,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def test_loras_merge_into_the_layers_of_gpt2() -> None:
    model = gpt2().eval()
    keys = model.state_dict().keys()
    seeds = {
        f"transformer.h.{i}.mlp.c_proj": (
            f"r0c{i}",
            seed_of("lora", "transformer", width=16),
            1.0,
        )
        for i in range(2)
    }
    attach(model, seeds)
    merged = esper.plain(model.eval(), IDS[:3], merge=True)
    assert merged.state_dict().keys() == keys
    torch.testing.assert_close(
        merged(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5
    )


WIDENED: dict[str, tuple[Any, str, dict[str, str], dict[str, Any]]] = {
    "bert": (
        bert,
        "encoder",
        {
            "r2c0": "bert.encoder.layer.0.intermediate.dense -> bert.encoder.layer.0.output.dense",
            "r3c0": "bert.encoder.layer.1.attention.self.query -> bert.encoder.layer.1.attention.self.query",
        },
        {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS},
    ),
    "gpt2": (
        gpt2,
        "transformer",
        {
            "r2c0": "transformer.h.0.mlp.c_fc -> transformer.h.0.mlp.c_proj",
            "r3c0": "transformer.h.1.attn.c_attn -> transformer.h.1.attn.c_attn",
        },
        {"input_ids": IDS, "labels": IDS},
    ),
}


@pytest.mark.parametrize("name", WIDENED)
def test_layers_are_widened_and_adapted_and_the_merged_model_is_an_ordinary_one(
    name: str,
) -> None:
    make, topology, sites, batch = WIDENED[name]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    plants = {0: plant("r2c0", "widen_half"), 1: plant("r3c0", "lora_2")}
    config = LENIENT.with_values(env={"at_once": True})
    grower = esper.Grower(
        model, sites, optimizer, script(plants), 4, topology=topology, config=config
    )
    for _ in range(4):
        model.train()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        grower.step(lambda model: float(-model.eval()(**batch).loss))
    assert grower.kept == {"r2c0": "widen_half", "r3c0": "lora_2"}
    with torch.no_grad():
        wanted = model.eval()(**batch).logits
    network = grower.finish(merge=True)
    with torch.no_grad():
        torch.testing.assert_close(network(**batch).logits, wanted)
    before = dict(make().named_parameters())
    wider = {
        key for key, p in network.named_parameters() if p.shape != before[key].shape
    }
    assert len(wider) == 3, "the weights of two layers, and the bias of the first one"
    assert before.keys() == dict(network.named_parameters()).keys()
    model.train()(**batch).loss.backward()
    optimizer.step()
