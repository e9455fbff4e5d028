"""The best return of the planted task, and that returns rank schedules as their outcomes do."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import spearmanr

from esper.config import TrainingConfig
from esper.control.heuristic import HeuristicController
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_best import Best, Schedule, best_return, edits, play
from esper.experiment.planted_score import Scale, discounted_returns, planted_scale
from esper.rewards.modes import MODES
from esper.spaces.action import Op


def config(mode: str = "shaped", n_envs: int = 1, horizon: int = 30) -> TrainingConfig:
    return TrainingConfig.parse({"env": {"n_envs": n_envs, "episode_length": horizon}, "reward": {"mode": mode}})


@cache
def best() -> Best:
    return best_return(config())


def random_schedule(random: np.random.Generator, env: PlantedVectorEnv) -> Schedule:
    """Some slots in some order with any blueprints, each seed's life at a pace of its own; some seeds are not kept."""
    schedule = np.zeros((env.horizon, 8), dtype=np.int64)
    start, encode = int(random.integers(8)), env.action_spec.encode
    for slot in random.permutation(env.action_spec.slots)[: random.integers(1, 4)].tolist():
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
            held + 1: encode(Op.FOSSILIZE, slot) if random.random() < 0.8 else encode(Op.PRUNE, slot),
        }
        for epoch, action in life.items():
            if epoch < env.horizon:
                schedule[epoch] = action
        start = held + 2 + int(random.integers(4))
    return schedule


def random_schedules(count: int, seed: int = 0, horizon: int = 30) -> NDArray[np.int64]:
    random, env = np.random.default_rng(seed), PlantedVectorEnv(config(horizon=horizon))
    return np.array([random_schedule(random, env) for _ in range(count)])


def test_no_random_schedule_beats_the_best() -> None:
    returns = play(random_schedules(400), config())
    assert returns.max() < best().discounted
    assert returns.max() > 0, "some of them grow something"


def test_no_single_edit_of_the_best_beats_it() -> None:
    env = PlantedVectorEnv(config())
    neighbours = np.array(list(edits(best().schedule, env.action_spec)))
    assert len(neighbours) > 500
    assert play(neighbours, config()).max() <= best().discounted + 1e-12


def test_no_two_edits_at_random_beat_it() -> None:
    env, random = PlantedVectorEnv(config()), np.random.default_rng(0)
    once = list(edits(best().schedule, env.action_spec))
    twice = []
    for place in random.choice(len(once), 40, replace=False):
        again = list(edits(once[place], env.action_spec))
        twice += [again[i] for i in random.choice(len(again), 40, replace=False)]
    assert play(np.array(twice), config()).max() <= best().discounted + 1e-12


def test_the_best_plants_the_best_blueprint_in_each_slot_in_order_of_worth() -> None:
    found = best_return(config(horizon=50))
    env = PlantedVectorEnv(config())
    planted = [
        (env.action_spec.slots[row[1]], env.action_spec.blueprints[row[2]])
        for row in found.schedule
        if row[0] == Op.GERMINATE
    ]
    assert planted == [("r0c1", "oak"), ("r0c0", "fern"), ("r0c2", "moss")]
    assert (found.schedule[:, 0] == Op.FOSSILIZE).sum() == 3


def test_a_schedule_is_worth_what_an_env_pays_for_it() -> None:
    """Noise has mean zero, and the best schedule's gates open with it: its mean return is the one without noise."""
    env = PlantedVectorEnv(config(n_envs=256))

    class Replay:
        def begin(self) -> None:
            self.epoch = -1

        def act(self, _observation: Any, _masks: Any) -> NDArray[np.int64]:
            self.epoch += 1
            return np.tile(best().schedule[self.epoch], (256, 1))

    returns = discounted_returns(env, Replay(), seed=0)
    kept = (env.seeds.fossil).sum(axis=1) == (best().schedule[:, 0] == Op.FOSSILIZE).sum()
    assert kept.mean() > 0.8, "noise seldom shuts a gate"
    assert returns[kept].mean() == pytest.approx(best().discounted, abs=0.02)


@pytest.mark.parametrize("mode", MODES)
def test_under_every_mode_the_best_return_beats_waiting(mode: str) -> None:
    """The schedule that is best when shaped is a lower bound of the mode's own best."""
    wait = np.zeros_like(best().schedule)
    grown, alone = play(np.array([best().schedule, wait]), config(mode))
    assert alone == pytest.approx(0.0, abs=1e-9)
    assert grown > 0.5


@pytest.mark.parametrize("mode", MODES)
def test_returns_rank_schedules_as_their_outcomes_do(mode: str) -> None:
    """Outcome: final committed accuracy, less what the mode itself charges for parameters; with noise."""
    chosen = config(mode, n_envs=50, horizon=50)
    env = PlantedVectorEnv(chosen)
    schedules = random_schedules(50, seed=1, horizon=50)
    env.reset(seed=0)
    returns = np.zeros(50)
    for epoch in range(env.horizon):
        _, rewards, _, _, info = env.step(schedules[:, epoch])
        returns += chosen.reward.gamma**epoch * rewards
    fossils = np.where(env.seeds.fossil, env.seeds.parameters, 0).sum(axis=1)
    rent = np.minimum(0.2 * np.log1p(fossils / 1000), 0.6)
    cost = {"shaped": rent, "advantage": rent, "simplified": 0.0, "sparse": 0.1 * fossils / 10_000}[mode]
    outcome = (info["committed_accuracy"] - info["baseline_accuracy"]) / 10 - cost
    assert len(np.unique(fossils)) > 5
    assert spearmanr(returns, outcome).statistic >= 0.9


def test_the_scale_runs_from_chance_to_the_best() -> None:
    scale = planted_scale(config(n_envs=16))
    assert (scale.score(scale.random), scale.score(scale.best)) == (0.0, 1.0)
    assert scale.best == best().discounted
    assert Scale(random=-1.0, best=3.0).score(1.0) == 0.5
    env = PlantedVectorEnv(config(n_envs=16))
    rule = discounted_returns(env, HeuristicController(env.action_spec, env.layout, 16), seed=0).mean()
    assert 0 < scale.score(float(rule)) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_every_modes_own_best_at_full_length(mode: str) -> None:
    found = best_return(config(mode, horizon=50))
    returns = play(random_schedules(400, seed=2, horizon=50), config(mode, horizon=50))
    assert found.discounted > max(1.0, float(returns.max()))
