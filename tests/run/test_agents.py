"""Learners of a run: PPO by its updates; the best agent is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from esper.files import checkpoint
from esper.files.policy import find_policy
from esper.run.agents import LearningAgent
from esper.telemetry.event import (
    AgentValidated,
)
from tests.run.run_helpers import (
    learning,
    of_kind,
    play,
)


def test_the_agent_that_did_best_on_validation_hosts_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Returns on the validation hosts are invented: the second agent of four is the best."""
    returns = iter((0.1, 0.9, 0.3, 0.2))
    weights: list[torch.Tensor] = []

    def made_up(self: LearningAgent, between_steps: object) -> float:
        weights.append(self.ppo.network.op_head[0].weight.detach().clone())
        return next(returns)

    monkeypatch.setattr(LearningAgent, "validation_return", made_up)
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


def test_an_agent_that_learns_nothing_is_level_with_itself_untrained(
    tmp_path: Path,
) -> None:
    differences = {}
    for rate in (1e-30, 0.1):
        ppo = {"learning_rate": rate, "update_epochs": 8}
        config = learning("planted", rounds=2, ppo=ppo, evaluation_pairs=4)
        config = config.with_values(env={"episode_length": 12})
        summary, _ = play(config, tmp_path / f"{rate}")
        (found,) = [c for c in summary.comparisons if c.pair.name_b == "untrained"]
        differences[rate] = found.pair.difference
    assert differences[1e-30] == 0.0
    assert differences[0.1] != 0.0
