"""Networks of other libraries: where they can grow is found, and a seed that is planted there changes no bit."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.core.action import Op
from esper.hosts.container import CONTAINER
from esper.hosts.example import arguments_of, difference, outputs_of, tensors_in
from esper.hosts.find import chosen_sites, find_sites
from esper.hosts.zoo import import_torchvision
from tests.grower.loops import LENIENT, Action, do, plant, script
from tests.selection import slow_except

Made = tuple[nn.Module, Any]

TINY = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def tokens(length: int = 12) -> Tensor:
    return torch.randint(3, 50, (3, length))


def of_transformers(
    config: str, model: str, example: Callable[[], Any], **sizes: Any
) -> Callable[[], Made]:
    """A model of transformers, made small from its config."""

    def make() -> Made:
        transformers = pytest.importorskip("transformers")
        return getattr(transformers, model)(
            getattr(transformers, config)(**sizes)
        ).eval(), example()

    return make


def of_timm(name: str, size: int = 32, **options: Any) -> Callable[[], Made]:
    """A model of timm."""

    def make() -> Made:
        import_torchvision()
        timm = pytest.importorskip("timm")
        return timm.create_model(name, num_classes=5, **options).eval(), torch.randn(
            2, 3, size, size
        )

    return make


def graph(layer: str, **options: Any) -> Callable[[], Made]:
    """Two layers of PyTorch Geometric."""

    def make() -> Made:
        layers = pytest.importorskip("torch_geometric.nn")

        class Graph(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = (
                    getattr(layers, layer)(width, 16, **options) for width in (5, 16)
                )
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
            self.embed, self.layer, self.head = (
                nn.Embedding(50, 16),
                kind(16, 16, batch_first=True),
                nn.Linear(16, 50),
            )

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


def segmenter() -> Made:
    import_torchvision()
    library = pytest.importorskip("segmentation_models_pytorch")
    return library.Unet(
        "resnet18", encoder_weights=None, classes=2
    ).eval(), torch.randn(2, 3, 64, 64)


def volumes(dimensions: int) -> Callable[[], Made]:
    """MONAI's U-Net for pictures or for volumes."""

    def make() -> Made:
        networks = pytest.importorskip("monai.networks.nets")
        sizes = {"channels": (4, 8, 16), "strides": (2, 2), "num_res_units": 2}
        network = networks.UNet(
            spatial_dims=dimensions, in_channels=1, out_channels=2, **sizes
        )
        return network.eval(), torch.randn(2, 1, *[16] * dimensions)

    return make


class Detector(nn.Module):
    """A detector of torchvision, which takes lists of pictures and of their boxes in training.

    Otherwise it returns scores and boxes for every anchor: the choice among them needs torchvision's compiled code.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pictures: list[Tensor]) -> dict[str, Tensor]:
        network: Any = self.network
        if self.training:
            losses: dict[str, Tensor] = network(pictures, [BOXES, BOXES])
            return losses
        images, _ = network.transform(pictures)
        found: dict[str, Tensor] = network.head(
            [*network.backbone(images.tensors).values()]
        )
        return found


def detector() -> Made:
    import_torchvision()
    detection = pytest.importorskip("torchvision.models.detection")
    backbone = detection.backbone_utils.resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, norm_layer=nn.BatchNorm2d
    )
    network = detection.RetinaNet(backbone, num_classes=3, min_size=64, max_size=64)
    return Detector(network).eval(), ([torch.rand(3, 64, 64), torch.rand(3, 64, 64)],)


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
    "ConvNeXt": (
        of_timm("convnext_atto", depths=(1, 1, 1, 1)),
        {"residual": 5, "widen": 4},
    ),
    "Swin": (
        of_timm(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            window_size=4,
            embed_dim=24,
            depths=(1, 1),
            num_heads=(2, 2),
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
        of_transformers(
            "ModernBertConfig",
            "ModernBertForSequenceClassification",
            _text,
            **TINY,
            **SPECIAL,
        ),
        {"lora": 4, "residual": 3},
    ),
    "GPT-2": (
        of_transformers(
            "GPT2Config",
            "GPT2LMHeadModel",
            _text,
            n_embd=32,
            n_layer=2,
            n_head=2,
            vocab_size=50,
            **SPECIAL,
        ),
        {"lora": 4, "widen": 2, "residual": 2},
    ),
    "Llama": (
        of_transformers(
            "LlamaConfig",
            "LlamaForCausalLM",
            _text,
            num_key_value_heads=2,
            **TINY,
            **SPECIAL,
        ),
        {"lora": 8, "residual": 2, "widen": 2},
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
        of_transformers(
            "AlbertConfig",
            "AlbertForSequenceClassification",
            _text,
            embedding_size=16,
            **TINY,
        ),
        {"widen": 1, "residual": 1},
    ),
    "ViT of transformers": (
        of_transformers(
            "ViTConfig",
            "ViTForImageClassification",
            _pictures,
            image_size=32,
            patch_size=8,
            **TINY,
        ),
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
            "MambaConfig",
            "MambaForCausalLM",
            _text,
            hidden_size=32,
            num_hidden_layers=2,
            vocab_size=50,
            state_size=4,
        ),
        {"residual": 2},
    ),
    "GCN": (graph("GCNConv"), {"residual": 2}),
    "GAT": (graph("GATConv"), {"residual": 2}),
    "LSTM": (recurrent(nn.LSTM), {"residual": 1}),
    "GRU": (recurrent(nn.GRU), {"residual": 1}),
    "DCGAN": (generator, {"residual": 2}),
    "U-Net of segmentation-models-pytorch": (segmenter, {"residual": 18, "widen": 14}),
    "U-Net of MONAI": (volumes(2), {"residual": 24}),
    "U-Net of MONAI, 3-D": (volumes(3), {"residual": 24}),
    "RetinaNet": (detector, {"residual": 16, "widen": 8}),
    "VAE": (
        lambda: (Variational().eval(), torch.randn(3, 20)),
        {"residual": 2, "widen": 1},
    ),
}
"""Networks by name, and the number of places of each kind that are found."""


def test_the_page_has_these_numbers() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "sites.md").read_text(
        encoding="utf-8"
    )
    words = " ".join(page.split())
    for name, (_, expected) in MODELS.items():
        numbers = "/".join(
            str(expected.get(kind, 0)) for kind in ("residual", "widen", "lora")
        )
        assert f"{name} {numbers}" in words


def life(planted: Mapping[str, str]) -> dict[int, Action]:
    """Plants seeds, the widening at once, and another from germination to a fossil."""
    actions, slot = {}, "r0c0"
    for number, (place, blueprint) in enumerate(planted.items()):
        actions[number] = plant(place, blueprint)
    if slot in planted:
        first = len(planted)
        later = (
            (Op.ADVANCE, first),
            (Op.ADVANCE, first + 3),
            (Op.ADVANCE, first + 7),
            (Op.FOSSILIZE, first + 8),
        )
        actions |= {epoch: do(op, slot) for op, epoch in later}
    return actions


BOXES = {"boxes": torch.tensor([[5.0, 5.0, 30.0, 30.0]]), "labels": torch.tensor([1])}


def learnable(model: nn.Module, example: Any) -> Tensor:
    """Returns a loss for every model: how far its outputs are from 1; for a detector, how far its losses are."""
    arguments, keywords = arguments_of(example)
    outputs = [
        each for each in tensors_in(model(*arguments, **keywords)) if each.requires_grad
    ]
    return torch.stack([(each.float() - 1).square().mean() for each in outputs]).sum()


FEW = (
    "ResNet",
    "Swin",
    "GPT-2",
    "ALBERT",
    "Whisper",
    "GAT",
    "LSTM",
    "DCGAN",
    "U-Net of MONAI, 3-D",
    "VAE",
)
"""One or two of each kind: convolutions, attention, shared layers, two inputs, graphs, recurrence, transposed and 3-D
convolutions, and outputs of several tensors."""


@pytest.mark.parametrize("name", slow_except(FEW, MODELS))
def test_what_is_kept_stays_in_copies_and_plain_networks(
    name: str,
) -> None:
    """A widening, on at once, and a seed that is tried learn and are kept; old and new weights can be loaded."""
    torch.manual_seed(0)
    model, example = MODELS[name][0]()
    sites = chosen_sites(model, example)
    places = [
        next((slot for slot in sites if slot.startswith(row)), None)
        for row in ("r2", "r0")
    ]
    planted = {
        slot: blueprint
        for slot, blueprint in zip(places, ("widen_whole", "norm"), strict=True)
        if slot
    }
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    controller = script(life(planted))
    gates = {
        "trial_standard_errors": 1000.0,
        "min_gradient_health": 0.0,
    }  # the loss is no task
    config = LENIENT.with_values(
        env={"at_once": True, "gates": gates}, task={"exploding_gradient": 1e12}
    )
    chosen = {slot: sites[slot] for slot in planted}
    grower = esper.Grower(
        model, chosen, optimizer, controller, horizon=14, example=example, config=config
    )
    alone = copied(model.state_dict())

    def evaluate(network: nn.Module) -> float:
        outputs_of(network, example)
        return 0.5

    grower.start(evaluate)
    learned: set[str] = set()
    for _ in range(12):
        optimizer.zero_grad()
        learnable(model.train(), example).backward()
        seeds = [
            (slot, seed)
            for slot, site in grower.hooks.sites.items()
            if (seed := site.seed) is not None
        ]
        learned |= {
            slot
            for slot, seed in seeds
            if any(p.grad is not None and p.grad.any() for p in seed.parameters())
        }
        optimizer.step()
        grower.step(evaluate)
    assert grower.kept == planted
    assert learned == set(planted)
    with torch.no_grad():
        for _, seed in seeds:
            for parameter in seed.parameters():
                parameter.add_(
                    torch.randn_like(parameter), alpha=0.02
                )  # what it adds can be seen
    before = outputs_of(model, example)
    grower.finish()
    assert equal(outputs_of(model, example), before)
    assert equal(outputs_of(copy.deepcopy(model), example), before)
    grown = copied(model.state_dict())
    found = model.load_state_dict(alone, strict=False)
    assert not found.unexpected_keys
    assert all(CONTAINER in key for key in found.missing_keys)
    model.load_state_dict(grown)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of seeds that stay modules
        plain = esper.plain(model, example, merge=True)
    assert difference(before, outputs_of(plain, example), torch.float32) is None


def copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


def equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("name", slow_except({*MODELS} - {"RetinaNet"}, MODELS))
def test_sites_are_found(name: str) -> None:
    torch.manual_seed(0)
    make, expected = MODELS[name]
    assert dict(Counter(site.kind for site in find_sites(*make()))) == expected
