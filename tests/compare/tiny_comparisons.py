"""Comparisons of controllers on hosts of four epochs."""

from __future__ import annotations

from typing import Any

from esper.compare.comparison import ArmResult, compare_controllers
from esper.config import TrainingConfig
from esper.telemetry.event import ArmPlayed


def tiny(n_envs: int = 2, **env: Any) -> TrainingConfig:
    """Hosts of four epochs on 256 images."""
    return TrainingConfig.parse(
        {
            "task": {"samples_per_epoch": 256},
            "env": {
                "n_envs": n_envs,
                "episode_length": 4,
                "baseline_episodes": 1,
                **env,
            },
        }
    )


def compare(
    controllers: list[str], pairs: int, config: TrainingConfig | None = None
) -> tuple[dict[str, ArmResult], list[ArmPlayed]]:
    events: list[ArmPlayed] = []
    arms = compare_controllers(config or tiny(), controllers, pairs, events.append)
    return {arm.controller: arm for arm in arms}, events
