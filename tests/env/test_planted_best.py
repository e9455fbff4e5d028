"""The best return of the planted task; returns rank schedules as their outcomes do."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import spearmanr

from benchmarks.planted_best import Best, Schedule, best_return, edits, play
from benchmarks.planted_score import PlantedScale, planted_scale
from esper.agents.heuristic import HeuristicController
from esper.config import TrainingConfig
from esper.core.action import Op
from esper.core.reward_modes import MODES
from esper.core.state import Floats
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_backend import SimParams
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


def random_schedule(random: np.random.Generator, env: PlantedVectorEnv) -> Schedule:
    """Some slots in some order with any blueprints, each seed's life at a pace of its own; some seeds are not kept."""
    schedule = np.zeros((env.horizon, 8), dtype=np.int64)
    start, encode = int(random.integers(8)), env.action_spec.encode
    for slot in random.permutation(env.action_spec.slots)[
        : random.integers(1, 4)
    ].tolist():
        tempo, incubation = int(random.choice([3, 5, 8])), int(random.integers(4, 9))
        name = str(random.choice(env.action_spec.blueprints))
        style = str(random.choice(env.action_spec.choices("style")))
        blended = start + 1 + incubation
        held = blended + tempo - 1
        life = {
            start: encode(Op.GERMINATE, slot, name, style, tempo),
            start + 1: encode(Op.ADVANCE, slot),
            blended: encode(Op.ADVANCE, slot),
            held: encode(Op.ADVANCE, slot),
            held + 1: encode(Op.FOSSILIZE, slot)
            if random.random() < 0.8
            else encode(Op.PRUNE, slot),
        }
        for epoch, action in life.items():
            if epoch < env.horizon:
                schedule[epoch] = action
        start = held + 2 + int(random.integers(4))
    return schedule


def random_schedules(
    count: int, seed: int = 0, horizon: int = HORIZON
) -> NDArray[np.int64]:
    random, env = np.random.default_rng(seed), PlantedVectorEnv(config(horizon=horizon))
    return np.array([random_schedule(random, env) for _ in range(count)])


def test_no_single_edit_of_the_best_beats_it() -> None:
    env = PlantedVectorEnv(config())
    neighbours = np.array(list(edits(best().schedule, env.action_spec)))
    assert len(neighbours) > 500
    assert play(neighbours, config()).max() <= best().discounted + 1e-12


def test_the_best_plants_the_best_blueprint_in_each_slot_in_order_of_worth() -> None:
    env = PlantedVectorEnv(config())
    planted = [
        (env.action_spec.slots[row[1]], env.action_spec.blueprints[row[2]])
        for row in best().schedule
        if row[0] == Op.GERMINATE
    ]
    assert planted == [("r0c1", "oak"), ("r0c0", "fern"), ("r0c2", "moss")]
    assert (best().schedule[:, 0] == Op.FOSSILIZE).sum() == 3


def test_a_schedule_is_worth_what_an_env_pays_for_it() -> None:
    """Noise has mean zero, and the best schedule's gates open with it: its mean return is the one without noise."""
    env = PlantedVectorEnv(config(n_envs=256))

    class Replay:
        def begin(self) -> None:
            self.epoch = -1

        def act(self, _observation: Any, _masks: Any) -> NDArray[np.int64]:
            self.epoch += 1
            return np.tile(best().schedule[self.epoch], (256, 1))

    returns = play_round(env, Replay(), seed=0).returns
    kept = (env.state.slots.fossil).sum(axis=1) == (
        best().schedule[:, 0] == Op.FOSSILIZE
    ).sum()
    assert kept.mean() > 0.8, "noise seldom shuts a gate"
    assert returns[kept].mean() == pytest.approx(best().discounted, abs=0.02)


@pytest.mark.trap(25)
@pytest.mark.parametrize("mode", MODES)
def test_under_every_mode_the_best_return_beats_waiting(mode: str) -> None:
    """The schedule that is best when shaped is a lower bound of the mode's own best."""
    wait = np.zeros_like(best().schedule)
    grown, alone = play(np.array([best().schedule, wait]), config(mode))
    assert alone == pytest.approx(0.0, abs=1e-9)
    assert grown > 0.5


def returns_and_outcomes(
    mode: str, loss_scale: float = 5.0, seed: int = 1
) -> tuple[Floats, Floats, Floats]:
    """Discounted returns, outcomes and leads before any action of 50 random schedules with noise, each [50].

    Outcomes are final committed accuracies in the units of the mode's benefit, less its charges for fossils.
    """
    chosen = config(mode, n_envs=50, horizon=50).with_values(
        reward={
            "loss_benefit_scale": loss_scale,
            "loss_contribution_potential": 0.5 / loss_scale,
        }
    )
    env = PlantedVectorEnv(chosen)
    schedules = random_schedules(50, seed=seed, horizon=50)
    _, info = env.reset(seed=0)
    lead = (info["validation_accuracy"] - info["baseline_accuracy"]) / 10
    returns = np.zeros(50)
    for epoch in range(env.horizon):
        _, rewards, _, _, info = env.step(schedules[:, epoch])
        returns += chosen.reward.gamma**epoch * rewards
    gained = info["committed_accuracy"] - info["baseline_accuracy"]
    # The law's loss falls by ln(10)/90 a point, and its standard deviation is that of 0.3 points.
    benefit = gained / 0.3 / loss_scale if mode.startswith("loss_") else gained / 10
    fossils = np.where(env.state.slots.fossil, env.state.slots.parameters, 0).sum(
        axis=1
    )
    assert len(np.unique(fossils)) > 5
    rent = np.minimum(0.2 * np.log1p(fossils / 1000), 0.6)
    cost = {"rent": rent, "fossil_cost": 0.1 * fossils / 10_000}
    charged = sum((cost[name] for name in MODES[mode] if name in cost), np.zeros(50))
    return returns, benefit - charged, lead


@pytest.mark.parametrize("mode", MODES)
def test_returns_rank_schedules_as_their_outcomes_do(mode: str) -> None:
    returns, outcomes, _ = returns_and_outcomes(mode)
    assert spearmanr(returns, outcomes).statistic >= 0.9


def test_advantage_ranks_alike_without_the_noise_before_the_first_action() -> None:
    """It pays for the change since the first measurement, whose noise no action can change. With that given back its
    ranks agree as those of the other modes do."""
    returns, outcomes, lead = returns_and_outcomes("advantage")
    assert spearmanr(returns + lead, outcomes).statistic >= 0.98


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
