"""Models of transformers, small ones, grow and stay what they are: the list of docs/transformers.md."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import esper
from esper.core.action import Op
from tests.grower.loops import LENIENT, do, plant, script

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed; see the extra integrations"
)

EPOCHS = 12
LATER = {
    1: do(Op.ADVANCE, "r0c0"),
    4: do(Op.ADVANCE, "r0c0"),
    8: do(Op.ADVANCE, "r0c0"),
    9: do(Op.FOSSILIZE, "r0c0"),
}
INCUBATES = 3
"""Epochs in which the seed only trains beside the model."""

DRAWS = torch.Generator().manual_seed(0)
IDS = torch.randint(3, 50, (4, 12), generator=DRAWS)
PADDED = torch.ones_like(IDS)
PADDED[0, 8:] = 0
PADDED_LEFT = torch.ones_like(IDS)
PADDED_LEFT[0, :4] = 0
LABELS = torch.tensor([0, 1, 0, 1])
TEXT = {"input_ids": IDS, "attention_mask": PADDED}
LANGUAGE = {**TEXT, "labels": IDS}
CLASSES = {**TEXT, "labels": LABELS}
IMAGES = {"pixel_values": torch.randn(4, 3, 32, 32, generator=DRAWS), "labels": LABELS}
SPEECH = {"input_features": torch.randn(4, 8, 40, generator=DRAWS), "labels": IDS}
SOUND = {"input_values": torch.randn(4, 400, generator=DRAWS), "labels": LABELS}
PAIRS = {"input_ids": IDS, "pixel_values": IMAGES["pixel_values"], "return_loss": True}
MASKS = {
    "pixel_values": IMAGES["pixel_values"],
    "labels": torch.randint(0, 2, (4, 32, 32), generator=DRAWS),
}

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
WORDS = {"vocab_size": 50, "pad_token_id": 0}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
PATCHES = {"image_size": 32, "patch_size": 8}
T5 = {
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
TWO_SIDES = {
    "d_model": 32,
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in
       (("layers", 2), ("attention_heads", 2), ("ffn_dim", 64))},
    "decoder_start_token_id": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Known:
    """A model of transformers: its class without the task, the task, where it grows, and a batch."""

    name: str
    task: str
    path: str
    topology: str
    batch: dict[str, Any]
    sizes: dict[str, Any]

    def make(self) -> Any:
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.name}Config")(**self.sizes)
        return getattr(transformers, f"{self.name}{self.task}")(config)


CLASSIFIES, READS, SEES = (
    "ForSequenceClassification",
    "ForCausalLM",
    "ForImageClassification",
)
TRANSLATES = "ForConditionalGeneration"
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
ZOO = [
    Known("Bert", CLASSIFIES, "bert.encoder.layer.0", "encoder", CLASSES, {**WORDS, **SMALL}),
    Known("Albert", CLASSIFIES, "albert.encoder.albert_layer_groups.0.albert_layers.0", "encoder", CLASSES,
          {**WORDS, **SMALL, "embedding_size": 16}),
    Known("ModernBert", CLASSIFIES, "model.layers.0", "encoder", CLASSES,
          {**WORDS, **SMALL, **ENDS, "cls_token_id": 1, "sep_token_id": 2}),
    Known("DistilBert", CLASSIFIES, "distilbert.transformer.layer.0", "encoder", CLASSES,
          {**WORDS, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}),
    Known("GPT2", "LMHeadModel", "transformer.h.0", "transformer", LANGUAGE,
          {**ENDS, "vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    Known("Llama", READS, "model.layers.0", "transformer", LANGUAGE, {**WORDS, **SMALL, "num_key_value_heads": 2}),
    Known("Qwen3", READS, "model.layers.0", "transformer", LANGUAGE, {**WORDS, **SMALL, **GROUPED}),
    Known("Gemma2", READS, "model.layers.0", "transformer", LANGUAGE, {**WORDS, **SMALL, **GROUPED}),
    Known("Mixtral", READS, "model.layers.0", "transformer", LANGUAGE,
          {**WORDS, **SMALL, "num_key_value_heads": 2, "num_local_experts": 2}),
    Known("Mamba", READS, "backbone.layers.0", "transformer", LANGUAGE,
          {**WORDS, **ENDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    Known("T5", TRANSLATES, "encoder.block.0", "encoder", LANGUAGE, {**WORDS, **T5}),
    Known("T5", TRANSLATES, "decoder.block.0", "transformer", LANGUAGE, {**WORDS, **T5}),
    Known("Bart", TRANSLATES, "model.decoder.layers.0", "transformer", LANGUAGE,
          {**WORDS, **ENDS, **TWO_SIDES, "forced_eos_token_id": None}),
    Known("Whisper", TRANSLATES, "model.decoder.layers.0", "transformer", SPEECH,
          {**WORDS, **ENDS, **TWO_SIDES, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64,
           "suppress_tokens": [], "begin_suppress_tokens": []}),
    Known("ViT", SEES, "vit.layers.0", "encoder", IMAGES, {**PATCHES, **SMALL}),
    Known("Dinov2", SEES, "dinov2.encoder.layer.0", "encoder", IMAGES, {**PATCHES, **SMALL}),
    Known("Swin", SEES, "swin.encoder.layers.0", "encoder", IMAGES,
          {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2],
           "window_size": 4}),
    Known("ConvNext", SEES, "convnext.encoder.stages.1", "cnn", IMAGES,
          {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}),
    Known("ResNet", SEES, "resnet.encoder.stages.0", "cnn", IMAGES,
          {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}),
    Known("Segformer", "ForSemanticSegmentation", "decode_head.classifier", "cnn", MASKS,
          {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
           "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
           "decoder_hidden_size": 16}),
    Known("CLIP", "Model", "vision_model.encoder.layers.0", "encoder", PAIRS,
          {"text_config": {**WORDS, **SMALL, **ENDS, "max_position_embeddings": 16},
           "vision_config": {**PATCHES, **SMALL}, "projection_dim": 16}),
    Known("Wav2Vec2", CLASSIFIES, "wav2vec2.encoder.layers.0", "encoder", SOUND,
          {**SMALL, "vocab_size": 50, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
           "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
           "mask_time_length": 2}),
]  # fmt: skip


def train(
    model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Any], seed: int
) -> None:
    """One step; some models draw from NumPy."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (theirs is the global one)
    model.train()
    optimizer.zero_grad()
    model(**batch).loss.backward()
    optimizer.step()


def logits(model: Any, batch: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        outputs = model.eval()(**batch)
    found: Tensor = outputs.logits if "logits" in outputs else outputs.logits_per_image
    return found


@pytest.mark.parametrize("known", ZOO, ids=lambda known: f"{known.name}-{known.path}")
def test_a_model_grows_is_saved_made_plain_and_generates(
    known: Known, tmp_path: Path
) -> None:
    from esper.integrations.pretrained import from_pretrained

    model, batch = known.make(), known.batch
    alone = copy.deepcopy(model)
    optimizers = {
        each: torch.optim.AdamW(each.parameters(), 1e-3) for each in (model, alone)
    }
    blueprint = "conv_small" if known.topology == "cnn" else "mlp_small"
    actions = script({0: plant("r0c0", blueprint), **LATER})
    sites = {"r0c0": known.path}
    options = {"topology": known.topology, "config": LENIENT}
    grower = esper.Grower(model, sites, optimizers[model], actions, EPOCHS, **options)
    for epoch in range(EPOCHS):
        train(model, optimizers[model], batch, epoch)
        grower.step(lambda _model: 0.5)
        if epoch < INCUBATES:  # planting and incubation change no bit
            train(alone, optimizers[alone], batch, epoch)
            assert all(
                torch.equal(a, b)
                for a, b in zip(model.parameters(), alone.parameters(), strict=True)
            )
    assert grower.kept == {"r0c0": blueprint}
    before = logits(model, batch)
    network: Any = grower.finish()
    assert torch.equal(logits(network, batch), before)
    network.save_pretrained(tmp_path)
    for copied in (
        from_pretrained(type(network), tmp_path),
        esper.plain(network, batch),
    ):
        torch.testing.assert_close(logits(copied, batch), before, rtol=1e-4, atol=1e-5)
    generates: Callable[[], bool] | None = getattr(network, "can_generate", None)
    if generates is not None and generates():
        check_generation(network, batch)


def check_generation(network: Any, batch: dict[str, Any]) -> None:
    """Generates the same with and without a cache, from a batch that is padded on the left."""
    prompt = {name: value for name, value in batch.items() if name != "labels"}
    if "attention_mask" in prompt:
        prompt["attention_mask"] = PADDED_LEFT
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with_cache, without = (
        network.generate(**prompt, use_cache=cache, **options)
        for cache in (True, False)
    )
    assert torch.equal(with_cache, without)


def test_the_table_lists_the_models_that_are_tried_here() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "transformers.md").read_text(
        encoding="utf-8"
    )
    listed = page.split("## Models of transformers", 1)[1].partition("\n\n")[2]
    names = listed.partition("\n\n")[2]
    assert set(re.findall(r"`(\w+)`", names)) == {
        known.name + known.task for known in ZOO
    }
