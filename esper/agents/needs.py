"""Settings that a controller needs in the place of a config's defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from esper.agents.spec import ControllerSpec
from esper.config import ConfigError, TrainingConfig
from esper.core.sizing import SIZING, WIDENINGS

ADVISOR = "advisor"
NEEDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {ADVISOR: {**SIZING, "env": {**SIZING["env"], "merge": True}}}
"""Settings by the name of a controller."""
WITHOUT_PRICE = ("heuristic", "plateau", "need", "random", "none", "schedule")
"""Kinds of controllers that decide without the price of parameters."""


def default_controller(config: TrainingConfig, widens: bool, missing: str) -> tuple[str, str]:
    """Returns the advisor's name if it can decide, and otherwise that of the rule, with the reason.

    ``widens``: slots widen layers; ``missing``: what it needs to know of the training and does not, in words.
    """
    offered = config.env.blueprints or tuple(WIDENINGS.values())
    if not widens:
        reason = "it finds no layer to widen"
    elif not set(offered) & set(WIDENINGS.values()):
        reason = "env.blueprints names no widening"
    elif missing:
        reason = f"it needs {missing}"
    else:
        return ADVISOR, ""
    return "heuristic", f"heuristic decides, not the advisor: {reason}"


def with_price(
    config: TrainingConfig,
    price: float | None,
    controller: str | Callable[..., Any],
    reason: str = "",
) -> TrainingConfig:
    """Returns the config with this price of parameters, unless it is None.

    Raises ConfigError if the controller, which was chosen for this ``reason``, decides without it.
    """
    if price is None:
        return config
    priced = config.with_values(reward={"mode": "priced", "price": price})
    spec = ControllerSpec.of(controller)
    if spec.kind in WITHOUT_PRICE:
        words = f"price= has no effect on controller {spec.name}, which does not read it; the advisor does"
        raise ConfigError(f"{words} ({reason})" if reason else words)
    return priced


def with_needs(controller: str | Callable[..., Any], config: TrainingConfig) -> TrainingConfig:
    """Returns the config with what a controller needs, by its name, where the config has defaults."""
    needs = NEEDS.get(ControllerSpec.of(controller).name)
    if needs is None:
        return config
    return config.with_defaults(**needs)
