"""Hosts with another loss, score or optimizer than those of images and texts."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import esper
from esper.config import TrainingConfig
from esper.core.stage import SeedStage
from esper.data.split import Split
from esper.data.task import Task
from esper.env.vector_env import GrowthVectorEnv
from esper.telemetry.event import EpochCompleted, GovernorRollback
from tests.core_helpers import flat_baseline, plant_in, tiny_config

X = torch.randn(192, 6, generator=torch.Generator().manual_seed(0))
SPLITS = (slice(0, 96), slice(96, 144), slice(144, 192))


def task(y: Tensor, outputs: int, **fields: Any) -> Task:
    def build() -> esper.hosts.graft.GraftedHost:
        net = nn.Sequential(
            nn.Sequential(nn.Linear(6, 4), nn.ReLU()),
            nn.Linear(4, 4),
            nn.Linear(4, outputs),
        )
        return esper.graft(net, {"r0c0": "0", "r0c1": "1"}, "mlp")

    return Task(
        "mine", None, build, *(Split(X[rows], y[rows]) for rows in SPLITS), **fields
    )


def regression(**fields: Any) -> Task:
    return task((X[:, 0] * X[:, 1] + X[:, 2])[:, None], 1, loss="mse", **fields)


def labels() -> Task:
    return task(
        (X[:, :3] > 0).float(), 3, loss="bce", optimizer="adamw", learning_rate=0.02
    )


def masks() -> Task:
    """A class for each of two places, as in segmentation: targets int64 [N, 2]."""
    y = (X[:, :2] > 0).long() + (X[:, 2:3] > 0).long()

    def of(outputs: Tensor) -> Tensor:
        return outputs.view(-1, 3, 2)

    return task(
        y,
        6,
        loss=lambda o, y: F.cross_entropy(of(o), y, reduction="none"),
        score=lambda o, y: of(o).argmax(1) == y,
    )


def config(horizon: int = 6, **sections: dict[str, Any]) -> TrainingConfig:
    sizes = {"samples_per_epoch": 96, "batch_size": 16}
    return tiny_config(
        1, horizon, **{"task": sizes, "env": {"parameter_budget": 100.0}, **sections}
    )


def played(
    made: Task, settings: TrainingConfig, steps: int = 6
) -> tuple[GrowthVectorEnv, list[Any]]:
    """An env with a blended seed after ``steps`` epochs, closed, and its events."""
    events: list[Any] = []
    horizon = settings.env.episode_length
    assert horizon is not None
    env = GrowthVectorEnv(
        made, settings, emit=events.append, baseline=flat_baseline(horizon)
    )
    with closing(env):
        env.reset(seed=0)
        plant_in(
            env,
            "r0c0",
            "norm" if env.training[0].host.topology == "cnn" else "mlp_small",
            stage=SeedStage.HOLDING,
        )
        wait = env.action_spec.encode(esper.core.action.Op.WAIT)[None]
        for _ in range(steps):
            env.step(wait)
    return env, events


@pytest.mark.parametrize("make", [regression, labels, masks])
def test_hosts_learn_and_seeds_are_measured_with_any_loss(make: Any) -> None:
    env, events = played(make(), config())
    epochs = [event for event in events if isinstance(event, EpochCompleted)]
    assert epochs[-1].validation_loss < epochs[0].validation_loss
    assert epochs[-1].validation_accuracy > epochs[0].validation_accuracy
    slots, s = env.state.slots, env.action_spec.slots.index("r0c0")
    assert np.isfinite([slots.contribution[0, s], slots.contribution_error[0, s]]).all()
    assert make is masks or slots.contribution[0, s] != 0


def test_chance_of_an_own_loss_is_that_of_the_untrained_host() -> None:
    """A loss of 100 times the size is no collapse, and one that explodes is rolled back."""
    large = replace(
        regression(),
        loss=lambda o, y: 100 * (o - y) ** 2,
        score="r2",
        learning_rate=5e-4,
    )
    env, events = played(large, config())
    assert not any(isinstance(event, GovernorRollback) for event in events)
    governor = env.backend.hosts[0].governor
    first = next(event for event in events if isinstance(event, EpochCompleted))
    assert governor.chance is not None
    assert governor.chance > first.validation_loss / 2
    assert governor.chance > 10
    _, events = played(replace(regression(), learning_rate=1e5), config())
    assert any(isinstance(event, GovernorRollback) for event in events)


def test_a_score_that_is_not_finite_is_a_panic() -> None:
    calls = iter(range(10**6))

    def fails_later(o: Tensor, y: Tensor) -> Tensor:
        return (o - y).abs().mean(1) + (float("nan") if next(calls) > 30 else 0.0)

    env, events = played(replace(regression(), score=fails_later), config())
    assert any(
        event.reason == "not finite"
        for event in events
        if isinstance(event, GovernorRollback)
    )
    assert bool(torch.isfinite(torch.from_numpy(env.state.total_reward)).all())
