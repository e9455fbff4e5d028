"""Blueprints: recipes for seeds, by topology and name."""

from esper.core.blueprints import cnn, source, transformer
from esper.core.blueprints.registry import BLUEPRINTS, Blueprint, BlueprintRegistry

source.register_in(BLUEPRINTS)

__all__ = ["BLUEPRINTS", "Blueprint", "BlueprintRegistry", "cnn", "source", "transformer"]
