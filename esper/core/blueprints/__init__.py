"""Blueprints: recipes for seeds, by topology and name."""

from esper.core.blueprints import cnn, source, transformer
from esper.core.blueprints.registry import BLUEPRINTS, Blueprint, BlueprintRegistry, choose

source.register_in(BLUEPRINTS)

__all__ = ["BLUEPRINTS", "Blueprint", "BlueprintRegistry", "choose", "cnn", "source", "transformer"]
