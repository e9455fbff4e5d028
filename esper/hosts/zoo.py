"""torchvision with any build of torch, and its models as hosts, with a slot after each of their stages.

torchvision from the public index is built for CUDA. With a CPU build of torch its compiled operators do not load, and
``import torchvision`` fails, because two of its modules register rules for operators that are not declared. Once they
are declared, its data sets, transforms and models work; only the operators themselves (such as nms) do not run.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from esper.config import ConfigError
from esper.hosts.find import slots_of
from esper.hosts.graft import GraftedHost, graft

_RESNET = slots_of(["layer1", "layer2", "layer3", "layer4"])
SITES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("resnet18", "resnet34", "resnet50", "resnet101", "wide_resnet50_2"), _RESNET),
    "densenet121": slots_of(
        ["features.denseblock1", "features.denseblock2", "features.denseblock3", "features.denseblock4"]
    ),
    "mobilenet_v2": slots_of(["features.3", "features.6", "features.13", "features.17"]),
    "convnext_tiny": slots_of(["features.1", "features.3", "features.5", "features.7"]),
}
"""Slot names and their submodules, by model."""


def torchvision_host(
    name: str,
    classes: int,
    sites: Mapping[str, str] | None = None,
    small_images: bool = False,
    weights: str | None = None,
) -> GraftedHost:
    """Makes a model of torchvision with ``classes`` outputs and a slot on the output of each site.

    Args:
        name: a name for ``torchvision.models.get_model``.
        classes: size of the logits.
        sites: slot name to submodule; None: the sites in ``SITES``.
        small_images: for ResNets, the stem for images of about 32 pixels: a 3×3 convolution with stride 1 in place of
            7×7 with stride 2, and no pool after it (He et al. 2016, 4.2).
        weights: pretrained weights, as for ``get_model``; the model then keeps its own number of outputs.

    Raises:
        ConfigError: an unknown model, a model without known sites if none are given, sites that it does not have, or
            ``small_images`` for a model that is not a ResNet.
    """
    models = import_torchvision("torchvision.models")
    if name not in models.list_models():
        raise ConfigError(f"torchvision has no model {name!r}; it has: {', '.join(models.list_models())}")
    if sites is None and name not in SITES:
        raise ConfigError(f"no sites are known for {name!r}: name them, or choose one of {', '.join(SITES)}")
    size = {}
    if weights is None:
        size["num_classes"] = classes
    model = models.get_model(name, weights=weights, **size)
    if small_images:
        if not isinstance(model, models.ResNet):
            raise ConfigError(f"small_images is for ResNets; {name} is not one")
        model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    return graft(model, SITES[name] if sites is None else sites)


SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""Operators for which torchvision registers rules even without its compiled operators."""


def import_torchvision(module: str = "torchvision") -> ModuleType:
    """Imports a module of torchvision, such as ``torchvision.datasets``. Raises ConfigError if it is not installed."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "torchvision is not installed. Each torchvision belongs to one torch, so name the pair: "
            "pip install torch==2.13.0 torchvision==0.28.0"
        )
    _declare_missing_operators(Path(spec.origin).parent)
    return importlib.import_module(module)


@cache  # torch's operator table is global, and an operator can be declared only once
def _declare_missing_operators(package: Path) -> torch.library.Library | None:
    """Returns the declarations, which last as long as they are referenced; None if the compiled operators load."""
    compiled = PathFinder.find_spec("_C", [str(package)])
    if compiled is not None and compiled.origin is not None:
        try:
            torch.ops.load_library(compiled.origin)  # type: ignore[no-untyped-call]
        except OSError:
            pass  # built for another torch
        else:
            return None
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in SCHEMAS:
        if not hasattr(torch.ops.torchvision, schema.partition("(")[0]):
            library.define(schema)  # type: ignore[no-untyped-call]
    return library
