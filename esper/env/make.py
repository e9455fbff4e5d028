"""An env for a task by name, whether its hosts are trained or simulated."""

from __future__ import annotations

import torch

from esper.config import TrainingConfig
from esper.data.tasks import load_task
from esper.env import planted
from esper.env.planted import PlantedVectorEnv
from esper.env.slot_env import SlotVectorEnv
from esper.env.vector_env import GrowthVectorEnv


def make_env(config: TrainingConfig) -> SlotVectorEnv:
    """The env of ``config.task.name`` on ``config.run.device``. Raises ConfigError listing the known names."""
    if config.task.name == planted.NAME:
        return PlantedVectorEnv(config)
    return GrowthVectorEnv(load_task(config.task.name).to(torch.device(config.run.device)), config)
