"""Networks of other libraries: where they can grow is found, and a seed that is planted there changes no bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.hosts.example import outputs_of
from esper.hosts.find import chosen_sites, find_sites
from esper.hosts.torchvision_shim import import_torchvision
from tests.grower.loops import LENIENT, plant, script

Made = tuple[nn.Module, Any]

TINY = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def tokens(length: int = 12) -> Tensor:
    return torch.randint(3, 50, (3, length))


def of_transformers(config: str, model: str, example: Callable[[], Any], **sizes: Any) -> Callable[[], Made]:
    """A model of transformers, made small from its config."""

    def make() -> Made:
        transformers = pytest.importorskip("transformers")
        return getattr(transformers, model)(getattr(transformers, config)(**sizes)).eval(), example()

    return make


def of_timm(name: str, size: int = 32, **options: Any) -> Callable[[], Made]:
    """A model of timm."""

    def make() -> Made:
        import_torchvision()
        timm = pytest.importorskip("timm")
        return timm.create_model(name, num_classes=5, **options).eval(), torch.randn(2, 3, size, size)

    return make


def graph(layer: str, **options: Any) -> Callable[[], Made]:
    """Two layers of PyTorch Geometric."""

    def make() -> Made:
        layers = pytest.importorskip("torch_geometric.nn")

        class Graph(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = (getattr(layers, layer)(width, 16, **options) for width in (5, 16))
                self.head = nn.Linear(16, 3)

            def forward(self, x: Tensor, edges: Tensor) -> Tensor:
                h = torch.relu(self.second(torch.relu(self.first(x, edges)), edges))
                return self.head(h)  # type: ignore[no-any-return]

        return Graph().eval(), (torch.randn(10, 5), torch.randint(0, 10, (2, 30)))

    return make


def recurrent(kind: type[nn.RNNBase]) -> Callable[[], Made]:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layer, self.head = nn.Embedding(50, 16), kind(16, 16, batch_first=True), nn.Linear(16, 50)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layer(self.embed(x))[0])  # type: ignore[no-any-return]

    return lambda: (Text().eval(), tokens())


def generator() -> Made:
    """The generator of a DCGAN."""

    def up(inputs: int, outputs: int) -> nn.Sequential:
        layer = nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())

    last = nn.Sequential(nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh())
    return nn.Sequential(up(8, 16), up(16, 8), last).eval(), torch.randn(3, 8, 4, 4)


class Variational(nn.Module):
    """A variational autoencoder, which returns several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(20, 16), nn.ReLU())
        self.mean, self.spread = nn.Linear(16, 4), nn.Linear(16, 4)
        self.decode = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 20))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encode(x)
        mean, spread = self.mean(h), self.spread(h)
        return self.decode(mean + torch.randn_like(mean) * spread.exp()), mean, spread


def _text() -> dict[str, Tensor]:
    return {"input_ids": tokens()}


def _pairs() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "decoder_input_ids": tokens(7)}


def _sounds() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": tokens(7)[:2]}


def _pictures() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, tuple[Callable[[], Made], dict[str, int]]] = {
    "ResNet": (of_timm("resnet10t"), {"residual": 7, "widen": 6}),
    "ConvNeXt": (of_timm("convnext_atto", depths=(1, 1, 1, 1)), {"residual": 5, "widen": 4}),
    "Swin": (
        of_timm(
            "swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=24, depths=(1, 1), num_heads=(2, 2)
        ),
        {"residual": 3, "lora": 4, "widen": 2},
    ),
    "EfficientNet": (of_timm("efficientnet_lite0"), {"residual": 18, "widen": 1}),
    "MLP-Mixer": (of_timm("mixer_s16_224", img_size=32), {"residual": 9, "widen": 16}),
    "ViT": (
        of_timm("vit_tiny_patch16_224", img_size=32, embed_dim=48, depth=2),
        {"residual": 3, "lora": 4, "widen": 2},
    ),
    "BERT": (
        of_transformers("BertConfig", "BertForSequenceClassification", _text, **TINY),
        {"lora": 8, "widen": 3, "residual": 2},
    ),
    "ModernBERT": (
        of_transformers("ModernBertConfig", "ModernBertForSequenceClassification", _text, **TINY, **SPECIAL),
        {"lora": 4, "residual": 3},
    ),
    "GPT-2": (
        of_transformers(
            "GPT2Config", "GPT2LMHeadModel", _text, n_embd=32, n_layer=2, n_head=2, vocab_size=50, **SPECIAL
        ),
        {"lora": 4, "widen": 2, "residual": 2},
    ),
    "Llama": (
        of_transformers("LlamaConfig", "LlamaForCausalLM", _text, num_key_value_heads=2, **TINY, **SPECIAL),
        {"lora": 8, "residual": 2},
    ),
    "T5": (
        of_transformers(
            "T5Config",
            "T5ForConditionalGeneration",
            _pairs,
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            vocab_size=50,
        ),
        {"lora": 24, "residual": 10, "widen": 4},
    ),
    "ALBERT": (
        of_transformers("AlbertConfig", "AlbertForSequenceClassification", _text, embedding_size=16, **TINY),
        {"widen": 1},
    ),
    "ViT of transformers": (
        of_transformers("ViTConfig", "ViTForImageClassification", _pictures, image_size=32, patch_size=8, **TINY),
        {"lora": 8, "widen": 2, "residual": 2},
    ),
    "Whisper": (
        of_transformers(
            "WhisperConfig",
            "WhisperForConditionalGeneration",
            _sounds,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            vocab_size=60,
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=20,
            decoder_start_token_id=1,
            **SPECIAL,
        ),
        {"widen": 5, "lora": 24, "residual": 4},
    ),
    "Mamba": (
        of_transformers(
            "MambaConfig", "MambaForCausalLM", _text, hidden_size=32, num_hidden_layers=2, vocab_size=50, state_size=4
        ),
        {"residual": 2},
    ),
    "GCN": (graph("GCNConv"), {"residual": 2}),
    "GAT": (graph("GATConv"), {"residual": 2}),
    "LSTM": (recurrent(nn.LSTM), {"residual": 1}),
    "GRU": (recurrent(nn.GRU), {"residual": 1}),
    "DCGAN": (generator, {"residual": 2}),
    "VAE": (lambda: (Variational().eval(), torch.randn(3, 20)), {"residual": 2, "widen": 1}),
}
"""Networks by name, and the number of places of each kind that are found."""


def test_the_table_of_the_page_has_these_numbers() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "growing.md").read_text(encoding="utf-8")
    for name, (_, expected) in MODELS.items():
        numbers = " | ".join(str(expected.get(kind, 0)) for kind in ("residual", "widen", "lora"))
        assert f"| {name} | {numbers} |" in page


@pytest.mark.parametrize("name", MODELS)
def test_sites_are_found_and_planting_changes_no_bit(name: str) -> None:
    torch.manual_seed(0)
    make, expected = MODELS[name]
    model, example = make()
    assert dict(Counter(site.kind for site in find_sites(model, example))) == expected
    chosen = chosen_sites(model, example)
    slot, blueprint = next(((slot, "norm") for slot in chosen if slot.startswith("r0")), ("r2c0", "widen_whole"))
    before = outputs_of(model, example)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    controller = script({0: plant(slot, blueprint)})
    grower = esper.Grower(model, "auto", optimizer, controller, horizon=3, example=example, config=LENIENT)

    def evaluate(network: nn.Module) -> float:
        outputs_of(network, example)
        return 0.5

    step = grower.start(evaluate)
    assert step.action is not None
    assert step.action.accepted, step.action.reason
    assert all(torch.equal(a, b) for a, b in zip(outputs_of(model, example), before, strict=True))
    grower.close()
    assert all(torch.equal(a, b) for a, b in zip(outputs_of(model, example), before, strict=True))
