"""The best return of the planted task; returns rank schedules as their outcomes do."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks.planted_best import Best, best_return, play
from benchmarks.planted_score import PlantedScale, planted_scale
from esper.agents.heuristic import HeuristicController
from esper.config import TrainingConfig
from esper.core.action import Op
from esper.core.reward_modes import MODES
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import SimParams
from esper.run.rollout import play_round

HORIZON = 24
"""Enough for three seeds, one after the other; the search takes half as long as at 30 epochs."""


def config(
    mode: str = "shaped", n_envs: int = 1, horizon: int = HORIZON
) -> TrainingConfig:
    return TrainingConfig.parse(
        {"env": {"n_envs": n_envs, "episode_length": horizon}, "reward": {"mode": mode}}
    )


@cache
def best() -> Best:
    return best_return(config())


@pytest.mark.slow
def test_the_best_plants_the_best_blueprint_in_each_slot_in_order_of_worth() -> None:
    env = PlantedVectorEnv(config())
    planted = [
        (env.action_spec.slots[row[1]], env.action_spec.blueprints[row[2]])
        for row in best().schedule
        if row[0] == Op.GERMINATE
    ]
    assert planted == [("r0c1", "oak"), ("r0c0", "fern"), ("r0c2", "moss")]
    assert (best().schedule[:, 0] == Op.FOSSILIZE).sum() == 3


@pytest.mark.slow
@pytest.mark.trap(25)
@pytest.mark.parametrize("mode", MODES)
def test_under_every_mode_the_best_return_beats_waiting(mode: str) -> None:
    """The schedule that is best when shaped is a lower bound of the mode's own best."""
    wait = np.zeros_like(best().schedule)
    grown, alone = play(np.array([best().schedule, wait]), config(mode))
    if "score" not in MODES[mode]:  # which pays what the host learns by itself as well
        assert alone == pytest.approx(0.0, abs=1e-9)
    assert grown - alone > 0.5


@pytest.mark.slow
def test_the_scale_runs_from_chance_to_the_best() -> None:
    scale = planted_scale(config(n_envs=16))
    assert (scale.score(scale.random), scale.score(scale.best)) == (0.0, 1.0)
    assert scale.best == best().discounted
    assert PlantedScale(random=-1.0, best=3.0).score(1.0) == 0.5
    env = PlantedVectorEnv(config(n_envs=16))
    rule = play_round(
        env, HeuristicController(env.action_spec, env.layout, 16), seed=0
    ).returns.mean()
    assert 0 < scale.score(float(rule)) < 0.9


def test_the_scale_of_losses_stays_when_noise_is_switched_off() -> None:
    """The search plays without noise and its result with noise, both in the same unit."""
    noisy, quiet = SimParams(), SimParams(noise=0.0, paired_noise=0.0)
    assert noisy.baseline(50, 8) == quiet.baseline(50, 8)
    assert noisy.baseline(50, 8).final_loss_std == pytest.approx(np.log(10) * 0.3 / 90)
    env = PlantedVectorEnv(config("loss_sparse", n_envs=256))
    env.reset(seed=0)
    for _ in range(env.horizon):
        env.step(np.zeros((256, 8), dtype=np.int64))
    assert env.state.loss.std() == pytest.approx(
        noisy.baseline(HORIZON, 8).final_loss_std, rel=0.1
    )
