"""Runs on hosts that differ: from the untrained agent to the comparison."""

from __future__ import annotations

import math
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from esper.agents.advised import AdvisedController
from esper.compare.evaluate import evaluate_controller
from esper.config import ConfigError, TrainingConfig
from esper.env.varied import VariedVectorEnv
from esper.run.experiment import Experiment
from esper.run.rollout import play_round
from esper.show.console import lines
from esper.show.read import open_run
from esper.telemetry.event import (
    AgentValidated,
    ContextDrawn,
    RoundCompleted,
    RunStarted,
)
from tests.env.test_varied import SHORT
from tests.run.run_helpers import (
    Does,
    Recorder,
    of_kind,
    round_ends,
    same_run,
    stop,
    within_round,
)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper.env.varied.LAW", SHORT)


def config(controller: str = "ppo", pairs: int = 4) -> TrainingConfig:
    return TrainingConfig.parse(
        {
            "task": {"name": "varied"},
            "env": {"n_envs": 4},
            "run": {"rounds": 2, "evaluation_pairs": pairs, "controller": controller},
            "ppo": {"width": 16, "validate_every": 1, "update_epochs": 2},
        }
    )


def test_a_run_ends_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    Experiment(config(), tmp_path / "whole").run()
    stops = Does(round_ends(1), lambda: experiment.stop())
    experiment = Experiment(config(), tmp_path / "cut", callbacks=[stops])
    assert experiment.run().interrupted
    Experiment.resume(tmp_path / "cut").run()
    same_run(tmp_path / "cut", tmp_path / "whole")


def test_in_rounds_of_cloning_the_advisor_acts_on_hosts_that_all_differ(
    tmp_path: Path,
) -> None:
    cloning = config(pairs=0).with_values(ppo={"cloning_rounds": 1})
    seen = Recorder()
    Experiment(cloning, tmp_path / "r", callbacks=[seen]).run()
    drawn = of_kind(seen, ContextDrawn)
    assert len({(event.source, event.price) for event in drawn[:4]}) == 4
    assert len({(event.source, event.price) for event in drawn[4:8]}) == 1
    # The advisor with the same first hosts, which are drawn for the same seed.
    with closing(VariedVectorEnv(cloning)) as env:
        env.configure(grouped=False)
        rule = AdvisedController(env.action_spec, env.layout, 4)
        advised = play_round(env, rule, seed=cloning.run.seed)
    (first, _) = of_kind(seen, RoundCompleted)
    assert first.mean_return == pytest.approx(float(np.mean(advised.returns)))


def test_a_run_that_stops_while_the_advisor_acts_goes_on_with_it(
    tmp_path: Path,
) -> None:
    cloning = config(pairs=0).with_values(ppo={"cloning_rounds": 1})
    Experiment(cloning, tmp_path / "whole").run()
    stops = Does(within_round(1), stop)
    with suppress(KeyboardInterrupt):
        Experiment(cloning, tmp_path / "cut", callbacks=[stops]).run()
    assert stops.did
    Experiment.resume(tmp_path / "cut").run()
    same_run(tmp_path / "cut", tmp_path / "whole")


def test_cloning_is_refused_where_the_advisor_cannot_act(tmp_path: Path) -> None:
    planted = TrainingConfig.parse(
        {"task": {"name": "planted"}, "ppo": {"cloning_rounds": 1}}
    )
    with pytest.raises(ConfigError, match="the advisor widens layers"):
        Experiment(planted, tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_the_untrained_agent_is_validated_beside_rules_and_compared_by_return(
    tmp_path: Path,
) -> None:
    seen = Recorder()
    summary = Experiment(config(), tmp_path / "r", callbacks=[seen]).run()
    first, *later = of_kind(seen, AgentValidated)
    assert first.round == 0
    assert set(first.rules) == {"none", "random", "advisor"}
    assert [event.round for event in later] == [1, 2]
    assert not any(event.rules for event in later)
    assert summary.score.name == "return"
    assert {found.pair.name_b for found in summary.comparisons} == {
        "none",
        "random",
        "advisor",
        "untrained",
    }
    # There is no curve of other hosts that these could be compared with.
    view = open_run(tmp_path / "r").view
    (words,) = lines(of_kind(seen, RoundCompleted)[-1], view, "")
    assert "not a number" not in words
    assert not view.has_baseline
    assert view.score == summary.score


def test_the_size_of_hosts_left_alone_is_the_mean_over_all_rounds(
    tmp_path: Path,
) -> None:
    summary = Experiment(config("none"), tmp_path / "r").run()
    assert summary.fossils == 0
    assert summary.host_parameters == round(summary.grown_parameters)


def test_networks_that_are_drawn_are_trained_and_not_called_simulated(
    tmp_path: Path,
) -> None:
    seen = Recorder()
    Experiment(config("none"), tmp_path / "r", callbacks=[seen]).run()
    (begun,) = of_kind(seen, RunStarted)
    assert begun.tier is not None
    view = open_run(tmp_path / "r").view
    assert not any("simulated" in line for line in lines(begun, view, ""))
    assert not view.own_loop


def test_a_rule_and_an_agent_play_the_same_contexts(tmp_path: Path) -> None:
    """Hosts left alone have the same returns beside either."""
    alone = {}
    for name, controller in (("rule", "advisor"), ("agent", "ppo")):
        summary = Experiment(config(controller, pairs=8), tmp_path / name).run()
        alone[name] = next(
            c.pair for c in summary.comparisons if c.pair.name_b == "none"
        )
    assert math.isfinite(alone["rule"].mean_b)
    evaluated = evaluate_controller(str(tmp_path / "agent"), tmp_path / "e").run()
    found = [host.accuracy for host in evaluated.hosts["none"]]
    assert sum(found) / len(found) == pytest.approx(alone["agent"].mean_b)


@pytest.mark.parametrize(
    ("n_envs", "ppo"),
    [(6, {"group": 4}), (4, {"group": 2, "episodes_per_update": 8})],
)
def test_groups_that_a_round_does_not_fill_are_refused_before_it(
    n_envs: int, ppo: dict[str, int], tmp_path: Path
) -> None:
    """Also on hosts of one task, where the envs of a group play different ones."""
    for task in ("varied", "planted"):
        tables = {"task": {"name": task}, "env": {"n_envs": n_envs}, "ppo": ppo}
        with pytest.raises(ConfigError, match="must be a multiple of it"):
            Experiment(TrainingConfig.parse(tables), tmp_path / task)


def test_an_agent_of_groups_is_compared_on_any_number_of_contexts(
    tmp_path: Path,
) -> None:
    Experiment(config(pairs=0), tmp_path / "r").run()
    found = evaluate_controller(
        str(tmp_path / "r"), tmp_path / "e", changes={"run": {"evaluation_pairs": 3}}
    ).run()
    assert found.pairs == 3
    assert not any("informed" in host.facts for host in found.hosts["greedy"])
