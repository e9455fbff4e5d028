"""Comparisons of controllers on hosts of four epochs."""

from __future__ import annotations

from esper.compare.comparison import ArmResult, compare_controllers
from esper.config import TrainingConfig
from esper.telemetry.event import ArmPlayed


def tiny(task: str = "planted", samples: int | None = None) -> TrainingConfig:
    return TrainingConfig.parse(
        {
            "task": {"name": task, "samples_per_epoch": samples},
            "env": {"n_envs": 2, "episode_length": 4, "baseline_episodes": 1},
        }
    )


def compare(
    controllers: list[str], pairs: int, config: TrainingConfig | None = None
) -> tuple[dict[str, ArmResult], list[ArmPlayed]]:
    events: list[ArmPlayed] = []
    arms = compare_controllers(config or tiny(), controllers, pairs, events.append)
    return {arm.controller: arm for arm in arms}, events
