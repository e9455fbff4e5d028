"""All parameters of a run, one file a section or two, and what reads them."""

from esper.config.controllers import ExperienceConfig, HeuristicConfig, PlansConfig, PlateauConfig, PPOConfig
from esper.config.files import read_toml, set_dotted
from esper.config.resolved import HostTrainingConfig, ResolvedConfig
from esper.config.task import Optimizer, Precision, TaskConfig
from esper.config.telemetry import AnomalyConfig, TrackConfig
from esper.config.training import (
    Durations,
    EnvConfig,
    GateConfig,
    GovernorConfig,
    RewardConfig,
    RewardMode,
    RunConfig,
    TrainingConfig,
)
from esper.config.types import describe_fields
from esper.errors import ConfigError, did_you_mean

__all__ = [
    "AnomalyConfig",
    "ConfigError",
    "Durations",
    "EnvConfig",
    "ExperienceConfig",
    "GateConfig",
    "GovernorConfig",
    "HeuristicConfig",
    "HostTrainingConfig",
    "Optimizer",
    "PPOConfig",
    "PlansConfig",
    "PlateauConfig",
    "Precision",
    "ResolvedConfig",
    "RewardConfig",
    "RewardMode",
    "RunConfig",
    "TaskConfig",
    "TrackConfig",
    "TrainingConfig",
    "describe_fields",
    "did_you_mean",
    "read_toml",
    "set_dotted",
]
