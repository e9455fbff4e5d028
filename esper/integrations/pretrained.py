"""Loading of grown models of transformers, from ``save_pretrained`` or from a checkpoint of a Trainer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import CONFIG_NAME
from transformers.utils.quantization_config import QuantizationConfigMixin

from esper.config import ConfigError
from esper.files.atomic import write_json
from esper.hosts.seed_state import add_seed, is_note, note_of, note_seeds, take_seeds
from esper.hosts.widen import resize

METHOD = "esper"
FILE = "grower.pt"
"""File of growth in a checkpoint of a Trainer, beside the model without its seeds."""


def from_pretrained(model_class: Any, source: Any, **options: Any) -> Any:
    """Loads a grown model, as ``model_class.from_pretrained(source, **options)`` loads one that has not grown.

    ``source`` may be a checkpoint of a Trainer with :class:`GrowthTrainerCallback`: the model has the seeds that were
    on when it was saved, and grows no further. The class has to be that of the saved model: parts of it have other
    keys. Raises ConfigError if nothing has grown in the saved model, or if a blueprint of its seeds is not registered
    in this program.
    """
    config = AutoConfig.from_pretrained(source)
    note: Any = getattr(config, "quantization_config", None)
    file = Path(source) / FILE
    growing: dict[str, Any] | None = None
    if file.is_file():
        growing = torch.load(file, map_location="cpu")["seeds"]
    if is_note(note):
        config.quantization_config = {**note, "quant_method": METHOD}
    elif growing is None:
        raise ConfigError(f"nothing has grown in {source}: load it by {model_class.__name__}.from_pretrained")
    model = model_class.from_pretrained(source, config=config, **options)
    if growing is not None:
        take_seeds(model, growing, make=True)
        model.load_state_dict(growing, strict=False)
        note_seeds(model)
    return model


def note_growing(checkpoint: Path) -> None:
    """Lets transformers refuse the model of a ``checkpoint`` with seeds, which it would load without them."""
    file = checkpoint / CONFIG_NAME
    if not file.is_file():
        return  # the model does not come from transformers
    config = json.loads(file.read_text(encoding="utf-8"))
    config.setdefault("quantization_config", note_of([], {}))
    write_json(file, config)


@register_quantization_config(METHOD)
@dataclass
class SeedsConfig(QuantizationConfigMixin):
    """The growth of a saved model, as its config describes it."""

    quant_method: Any = METHOD
    needs: str = ""
    seeds: list[dict[str, Any]] = field(default_factory=list)
    shapes: dict[str, list[int]] = field(default_factory=dict)
    """Shapes of the tensors that merged seeds have widened, by name."""


@register_quantizer(METHOD)
class SeedsLoader(HfQuantizer):
    """Makes the seeds of a model before its weights are loaded; nothing is quantized."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: nn.Module, **_more: Any) -> nn.Module:
        config: Any = self.quantization_config
        resize(model, {name: torch.Size(shape) for name, shape in config.shapes.items()})
        for seed in config.seeds:
            add_seed(model, seed)
        return model

    def _process_model_after_weight_loading(self, model: nn.Module, **_more: Any) -> nn.Module:
        return model

    def postprocess_model(self, model: Any, **more: Any) -> Any:
        """Leaves an ordinary model, which is trained, saved and converted as any other."""
        model = super().postprocess_model(model, **more)
        for name in ("hf_quantizer", "quantization_method"):
            if name in model.__dict__:
                delattr(model, name)
        model.is_quantized = False
        del model.config.quantization_config
        note_seeds(model)
        return model

    def is_serializable(self, *_more: Any, **_named: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True
