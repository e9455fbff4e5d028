"""Learners of a run: the bandit by its experience, PPO by its updates; the best agent is kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.compare.comparison import compare_controllers
from esper.config import ConfigError
from esper.files import checkpoint
from esper.files.policy import find_policy
from esper.run.agents import PPORun
from esper.run.experiment import Experiment
from esper.telemetry.event import (
    AgentValidated,
    RoundCompleted,
    WorthsEstimated,
)
from esper.training.rng import HELD_OUT
from tests.run.run_helpers import (
    Does,
    learning,
    of_kind,
    play,
    round_ends,
    same_results,
    same_run,
)


def test_plans_learns_within_its_run_and_is_compared_with_all_others(
    tmp_path: Path,
) -> None:
    config = learning(
        "planted", n_envs=8, controller="plans", rounds=6, evaluation_pairs=2
    ).with_values(env={"episode_length": 20})
    summary, recorder = play(config, tmp_path / "r")
    assert [c.pair.name_b for c in summary.comparisons] == [
        "none",
        "random",
        "heuristic",
        "schedule",
    ]
    gains = [
        e.committed_accuracy - e.baseline_accuracy
        for e in of_kind(recorder, RoundCompleted)
    ]
    assert np.mean(gains[3:]) > gains[0] + 2
    told = of_kind(recorder, WorthsEstimated)
    assert [event.episodes for event in told] == [8, 16, 24, 32, 40, 48]
    best = {
        slot: max(row, key=lambda name: row[name][0])
        for slot, row in told[-1].worths.items()
    }
    assert best == {"r0c0": "fern", "r0c1": "oak", "r0c2": "moss"}


def test_interrupted_plans_end_as_if_they_had_never_stopped(tmp_path: Path) -> None:
    config = learning("planted", controller="plans")
    play(config, tmp_path / "whole")
    stops = Does(round_ends(2), lambda: experiment.stop())
    experiment = Experiment(config, tmp_path / "cut", callbacks=[stops])
    assert experiment.run().interrupted
    Experiment.resume(tmp_path / "cut").run()
    same_run(tmp_path / "cut", tmp_path / "whole")


def test_plans_of_a_run_plays_elsewhere_and_without_one_it_is_refused(
    tmp_path: Path,
) -> None:
    config = learning("planted", n_envs=8, controller="plans", rounds=3).with_values(
        env={"episode_length": 30}
    )
    play(config, tmp_path / "r")
    arms = compare_controllers(config, [f"plans:{tmp_path / 'r'}", "none"], pairs=8)
    assert (arms[0].accuracy > arms[1].accuracy).all()
    assert arms[0].controller == f"plans:{tmp_path / 'r'}"
    with pytest.raises(ConfigError, match="name the run, as in plans:RUN_FOLDER"):
        compare_controllers(config, ["plans", "none"], pairs=4)
    other = config.with_values(env={"blueprints": ["moss", "oak"]})
    with pytest.raises(
        ConfigError,
        match=r"knows .* and blueprints moss, fern, oak, ivy; this host has .*moss, oak$",
    ):
        compare_controllers(other, [f"plans:{tmp_path / 'r'}", "none"], pairs=4)


@pytest.mark.slow
def test_plans_of_a_run_plays_other_hosts_and_resumes_without_that_run(
    tmp_path: Path,
) -> None:
    first = learning("planted", n_envs=4, controller="plans", rounds=2)
    play(first, tmp_path / "r")
    config = first.with_values(run={"controller": f"plans:{tmp_path / 'r'}"})
    informed = Experiment(config, tmp_path / "whole")
    whole = informed.run()
    assert informed.trainer.env.run_seed == first.run.seed + HELD_OUT
    sink = Does(round_ends(1), lambda: experiment.stop())
    experiment = Experiment(config, tmp_path / "cut", callbacks=[sink])
    assert experiment.run().interrupted
    shutil.rmtree(tmp_path / "r")
    resumed = Experiment.resume(tmp_path / "cut").run()
    same_results(resumed, whole)


def test_the_agent_that_did_best_on_validation_hosts_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Returns on the validation hosts are invented: the second agent of four is the best."""
    returns = iter((0.1, 0.9, 0.3, 0.2))
    weights: list[torch.Tensor] = []

    def made_up(self: PPORun, between_steps: object) -> float:
        weights.append(self.ppo.network.op_head[0].weight.detach().clone())
        return next(returns)

    monkeypatch.setattr(PPORun, "validation_return", made_up)
    _, seen = play(
        learning("planted", n_envs=4, rounds=4, ppo={"validate_every": 1}),
        tmp_path / "r",
    )
    assert len(weights) == 4
    kept = checkpoint.read(tmp_path / "r")["policy"]["network"]["op_head.0.weight"]
    assert torch.equal(kept, weights[1])
    assert not torch.equal(kept, weights[3])
    told = [
        (event.round, event.mean_return, event.best_round)
        for event in of_kind(seen, AgentValidated)
    ]
    assert told == [(1, 0.1, 1), (2, 0.9, 2), (3, 0.3, 2), (4, 0.2, 2)]
    assert (
        find_policy(str(tmp_path / "r")).origin
        == "learned on planted, 4 of 4 rounds, best after round 2, seed 7"
    )


def test_an_agent_is_not_validated_where_there_is_no_other(tmp_path: Path) -> None:
    config = learning("planted", n_envs=4, rounds=2, ppo={"validate_every": 2})
    _, seen = play(config, tmp_path / "r")
    assert of_kind(seen, AgentValidated) == []


@pytest.mark.parametrize(("practice", "rate"), [(0, 1e-3), (32, 2e-4)])
def test_an_agent_that_has_practised_learns_at_a_lower_rate(
    practice: int, rate: float, tmp_path: Path
) -> None:
    """Otherwise the returns of a few hosts would displace what many simulated ones have taught."""
    with Experiment(
        learning(ppo={"practice_steps": practice}), tmp_path / "r"
    ) as experiment:
        agent = experiment.trainer.agent
        assert isinstance(agent, PPORun)
        assert agent.ppo.config.learning_rate == pytest.approx(rate)
        assert agent.ppo.config.entropy_start == pytest.approx(
            0.001 if practice else 0.05
        )
