"""Sizing: growth by widenings before the first epoch, in names and values that load no arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WIDENINGS = {2: "widen_whole", 4: "widen_x4", 8: "widen_x8", 16: "widen_x16"}
"""Blueprint by the multiple of a layer's width that it leads to."""
SIZING: Mapping[str, Mapping[str, Any]] = {
    "env": {
        "blueprints": tuple(WIDENINGS.values()),
        "edits_per_epoch": 16,
        "at_once": True,
        "parameter_budget": 300.0,
    },
    "reward": {"mode": "priced"},
}
"""Values of a config in which all sizes can be had before the first epoch, and are paid by their parameters."""
FACTORS = (1, *WIDENINGS)
"""Multiples of widths that sizes are chosen among; 1 grows nothing."""
