"""Models of Hugging Face, made from a config, grow without a wrapper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.core.ramps import BlendOperator
from esper.hosts.graft import graft
from esper.hosts.seed_hook import attach
from tests.grower.loops import GROWS, LENIENT, plant, script
from tests.hosts.grown_modules import seed_of
from tests.hosts.test_plain import without_esper

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


def vit() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.ViTConfig(**SMALL, image_size=8, patch_size=4, num_channels=1)
    model: nn.Module = transformers.ViTForImageClassification(config)
    return model


def split(rows: slice) -> esper.Split:
    return esper.Split(
        {"input_ids": IDS[rows], "attention_mask": MASK[rows]}, LABELS[rows]
    )


def test_bert_is_a_host_and_its_mask_matters() -> None:
    task = esper.Task(
        name="bert",
        classes=2,
        build_host=lambda: esper.graft(
            bert(), {"r0c0": "bert.encoder.layer.0"}, "encoder"
        ),
        train=split(slice(0, 40)),
        validation=split(slice(40, 52)),
        test=split(slice(52, 64)),
        batch_size=8,
    )
    grown = esper.grow(task, "random", epochs=4)
    assert grown.refusals == ()
    x = task.test.x.values
    assert grown.accuracy == pytest.approx(
        esper.accuracy(grown.network, x, task.test.y)
    )
    unmasked = grown.network(
        input_ids=x["input_ids"], attention_mask=torch.ones_like(x["attention_mask"])
    )
    assert not torch.equal(grown.network(**x), unmasked)


def test_bert_grows_in_a_plain_loop_and_becomes_bert_again() -> None:
    model = bert()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    grower = esper.Grower(
        model,
        {"r0c0": "bert.encoder.layer.1"},
        optimizer,
        GROWS,
        12,
        topology="encoder",
        config=LENIENT,
    )

    def evaluate(model: nn.Module) -> Tensor:
        return (
            model.eval()(input_ids=IDS, attention_mask=MASK).logits.argmax(1) == LABELS
        ).float()

    for _ in range(12):
        model.train()
        model(input_ids=IDS, attention_mask=MASK, labels=LABELS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        grower.step(evaluate)
    network = grower.finish().eval()
    assert grower.kept == {"r0c0": "mlp_small"}
    x = {"input_ids": IDS[:5], "attention_mask": MASK[:5]}
    plain = esper.plain(network, x)
    assert without_esper(plain)
    assert type(plain) is type(bert())
    torch.testing.assert_close(
        plain(**x).logits, network(**x).logits, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("make", "path", "topology", "x"),
    [
        (gpt2, "transformer.h.1", "transformer", IDS[:3]),
        (
            gpt2,
            "transformer.h.0.attn",
            "transformer",
            IDS[:3],
        ),  # whose module returns a tuple
        (vit, "vit.layers.0", "encoder", torch.randn(3, 1, 8, 8)),
        (bert, "bert.encoder.layer.0.attention", "encoder", (IDS[:3], MASK[:3])),
    ],
    ids=["block", "attention", "vit", "bert"],
)
def test_sites_of_known_models_hold_seeds_that_can_be_made_plain(
    make: Any, path: str, topology: str, x: Any
) -> None:
    host = graft(make().eval(), {"r0c0": path}, topology, example=x)
    assert [site.channels for site in host.sites] == [16]
    model = make().eval()
    attach(
        model,
        {path: ("r0c0", seed_of("attention", topology, BlendOperator.GATE, 16), 0.5)},
    )
    model.eval()
    plain = esper.plain(model, x)
    assert without_esper(plain)
    x = x if isinstance(x, tuple) else (x,)
    found, wanted, bare = (
        network(*x).logits for network in (plain, model, make().eval())
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(bare, wanted, rtol=1e-4, atol=1e-6)


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
