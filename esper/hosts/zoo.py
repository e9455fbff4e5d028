"""torchvision's models as hosts, with a slot after each of their stages."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from esper.config import ConfigError
from esper.hosts.graft import GraftedHost, graft
from esper.hosts.torchvision_shim import import_torchvision

_RESNET = MappingProxyType({f"r0c{i}": f"layer{i + 1}" for i in range(4)})
SITES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("resnet18", "resnet34", "resnet50", "resnet101", "wide_resnet50_2"), _RESNET),
        "densenet121": {f"r0c{i}": f"features.denseblock{i + 1}" for i in range(4)},
        "mobilenet_v2": {"r0c0": "features.3", "r0c1": "features.6", "r0c2": "features.13", "r0c3": "features.17"},
        "convnext_tiny": {f"r0c{i}": f"features.{2 * i + 1}" for i in range(4)},
    }
)
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
