"""Blueprints: recipes for seeds, by topology and name."""

from esper.seeds.blueprints import cnn, transformer
from esper.seeds.blueprints.registry import BLUEPRINTS, Blueprint, BlueprintRegistry, choose

__all__ = ["BLUEPRINTS", "Blueprint", "BlueprintRegistry", "choose", "cnn", "transformer"]
