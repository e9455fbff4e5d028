"""The configuration: its bounds, errors, and durations that scale with the horizon."""

from __future__ import annotations

import math
from typing import Any

import pytest

from esper.config import ConfigError, Durations, TrainingConfig, describe_fields

NUMBERS = [
    name
    for name, _, _ in describe_fields(TrainingConfig)
    if name
    not in (
        "run.controller",
        "run.device",
        "task.name",
        "task.schedule",
        "env.one_incubating",
        "env.auto_advance",
    )
    and not name.startswith("ppo.prior_")  # logits
    and name
    not in (
        "env.gates.level",
        "reward.mode",
        "ppo.anneal",
        "ppo.device",
        "task.data",
        "task.download",
    )
]


MEASURED = ("env.gates.min_contribution", "anomaly.explained_variance")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1])
def test_no_number_of_the_config_accepts_a_negative_or_infinite_value(
    value: float,
) -> None:
    """Thresholds of what is measured may be negative."""
    for name in NUMBERS:
        if name in MEASURED and value == -1:
            continue
        *sections, key = name.split(".")
        tables: Any = {key: value}
        for section in reversed(sections):
            tables = {section: tables}
        with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
            TrainingConfig.parse(tables)


@pytest.mark.parametrize(
    ("horizon", "expected"),
    [
        (150, (10, 10, 5, 5, 30, 10, 5, 20)),
        (30, (2, 2, 1, 1, 6, 2, 1, 5)),
        (75, (5, 5, 3, 3, 15, 5, 3, 10)),
        (1, (2, 2, 1, 1, 4, 2, 1, 5)),
    ],
)
def test_durations_scale_with_the_horizon_rounded_up(
    horizon: int, expected: tuple[int, ...]
) -> None:
    d = Durations.of(TrainingConfig(), horizon)
    assert (
        d.min_training_epochs,
        d.min_blending_epochs,
        d.min_prune_age,
        d.embargo,
        d.max_training_epochs,
        d.stage_dwell,
        d.snapshot_every,
        d.governor_window,
    ) == expected


def test_an_error_tells_of_a_few_problems_and_counts_the_others() -> None:
    with pytest.raises(ConfigError, match=r"and 4 problems more$") as found:
        TrainingConfig.parse({"run": {f"x{i}": 1 for i in range(9)}})
    assert len(str(found.value).splitlines()) == 6


def test_values_take_the_place_of_defaults_only() -> None:
    config = TrainingConfig().with_values(env={"max_seeds": 2})
    found = config.with_defaults(
        env={"max_seeds": 5, "edits_per_epoch": 4}, run={"seed": 3}
    )
    assert (found.env.max_seeds, found.env.edits_per_epoch, found.run.seed) == (2, 4, 3)


def test_a_copy_sets_no_more_values_than_the_config_did() -> None:
    config = TrainingConfig().with_values(env={"n_envs": 4})
    assert config.env.model_fields_set == {"n_envs"}
    assert "seed" not in config.run.model_fields_set
    assert config.with_values(run={"seed": 3}).run.model_fields_set == {"seed"}
