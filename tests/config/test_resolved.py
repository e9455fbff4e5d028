"""Configs whose sizes are all known."""

from __future__ import annotations

import pytest

from esper.config import ConfigError, Durations
from esper.config.resolved import HostTrainingConfig, ResolvedConfig
from esper.data.task import resolve
from tests.core_helpers import digits, tiny_config


def test_a_host_trains_on_full_batches_only() -> None:
    config = resolve(
        tiny_config(task={"samples_per_epoch": 70, "batch_size": 32}), digits()
    )
    assert config.trained_samples == 64
    assert config.durations == Durations.of(config, 8)


def test_simulated_hosts_train_on_nothing() -> None:
    sizes = {
        "run": {"rounds": 1},
        "env": {"n_envs": 2, "episode_length": 9, "at_once": False, "slots": None},
    }
    config = ResolvedConfig.parse(tiny_config().tables_with(sizes))
    assert config.trained_samples == 0
    assert config.durations == Durations.of(config, 9)


@pytest.mark.parametrize(
    "missing", ["run.rounds", "env.n_envs", "task.learning_rate", "task.precision"]
)
def test_a_size_that_is_left_open_is_refused(missing: str) -> None:
    section, name = missing.split(".")
    resolved = resolve(tiny_config(), digits())
    with pytest.raises(ConfigError, match=missing.replace(".", r"\.")):
        HostTrainingConfig.parse(resolved.tables_with({section: {name: None}}))
