"""Settings that a controller needs in the place of a config's defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from esper.agents.spec import ControllerSpec
from esper.config import TrainingConfig
from esper.core.sizing import SIZING, WIDENINGS

ADVISOR = "advisor"
NEEDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {ADVISOR: {**SIZING, "env": {**SIZING["env"], "merge": True}}}
"""Settings by the name of a controller."""


def default_controller(config: TrainingConfig, widens: bool, told: bool) -> str:
    """Returns the advisor's name if it can decide, and otherwise that of the rule.

    ``widens``: slots widen layers; ``told``: the numbers of samples and classes are known.
    """
    offered = config.env.blueprints or tuple(WIDENINGS.values())
    if widens and told and set(offered) & set(WIDENINGS.values()):
        return ADVISOR
    return "heuristic"


def with_needs(controller: str | Callable[..., Any], config: TrainingConfig) -> TrainingConfig:
    """Returns the config with what a controller needs, by its name, where the config has defaults."""
    needs = NEEDS.get(ControllerSpec.of(controller).name)
    if needs is None:
        return config
    return config.with_defaults(**needs)
