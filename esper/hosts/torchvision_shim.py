"""Imports torchvision with any build of torch.

torchvision from the public index is built for CUDA. With a CPU build of torch its compiled operators do not load, and
``import torchvision`` fails, because two of its modules register rules for operators that are not declared. Once they
are declared, its data sets, transforms and models work; only the operators themselves (such as nms) do not run.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import torch

from esper.config import ConfigError

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
