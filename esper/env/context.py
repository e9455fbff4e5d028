"""The objects that all envs of one vector env share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from esper.config_resolved import ResolvedConfig
from esper.env.baseline import Baseline
from esper.seeds.blueprints import BlueprintRegistry
from esper.spaces.action import ActionSpec
from esper.telemetry.event import Event
from esper.training.placement import HostCopy


@dataclass(frozen=True)
class RunContext:
    """Read-only objects shared by all envs."""

    config: ResolvedConfig
    spec: ActionSpec
    blueprints: BlueprintRegistry
    baseline: Baseline
    emit: Callable[[Event], None]
    pinned: tuple[HostCopy, ...] = ()
    """Copies of hosts that lie in pinned CPU memory where hosts are on a GPU."""
