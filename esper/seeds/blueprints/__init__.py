"""Blueprints: recipes for seeds, by topology and name."""

from esper.seeds.blueprints import cnn
from esper.seeds.blueprints.registry import BLUEPRINTS, Blueprint, BlueprintRegistry

__all__ = ["BLUEPRINTS", "Blueprint", "BlueprintRegistry", "cnn"]
