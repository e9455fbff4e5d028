"""All parameters of a run, one file a section or two, and what reads them; each name is imported when it is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from esper.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from esper.config.controllers import HeuristicConfig, PlateauConfig, PPOConfig
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

_HOMES = {
    "AnomalyConfig": "telemetry",
    "Durations": "training",
    "EnvConfig": "training",
    "GateConfig": "training",
    "GovernorConfig": "training",
    "HeuristicConfig": "controllers",
    "HostTrainingConfig": "resolved",
    "Optimizer": "task",
    "PPOConfig": "controllers",
    "PlateauConfig": "controllers",
    "Precision": "task",
    "ResolvedConfig": "resolved",
    "RewardConfig": "training",
    "RewardMode": "training",
    "RunConfig": "training",
    "TaskConfig": "task",
    "TelemetryConfig": "telemetry",
    "TrackConfig": "telemetry",
    "TrainingConfig": "training",
    "describe_fields": "types",
    "read_toml": "files",
    "set_dotted": "files",
}
__all__ = [
    "AnomalyConfig",
    "ConfigError",
    "Durations",
    "EnvConfig",
    "GateConfig",
    "GovernorConfig",
    "HeuristicConfig",
    "HostTrainingConfig",
    "Optimizer",
    "PPOConfig",
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
