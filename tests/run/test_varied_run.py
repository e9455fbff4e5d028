"""Runs on hosts that differ: from the untrained agent to the comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
from esper.run.telemetry import RunSummary
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
    play,
    round_ends,
    same_run,
    stop,
    within_round,
)


@pytest.fixture(autouse=True, scope="module")
def short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.env.varied.LAW", SHORT)
        yield


def config(controller: str = "ppo", pairs: int = 4) -> TrainingConfig:
    return TrainingConfig.parse(
        {
            "task": {"name": "varied"},
            "env": {"n_envs": 4},
            "run": {"rounds": 2, "evaluation_pairs": pairs, "controller": controller},
            "ppo": {"width": 16, "validate_every": 1, "update_epochs": 2},
        }
    )


CLONING = config(pairs=0).with_values(ppo={"cloning_rounds": 1})


@pytest.fixture(scope="module")
def learned(
    short: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunSummary, Recorder]:
    """A run of the agent, which is never stopped."""
    return play(config(), tmp_path_factory.mktemp("learned") / "r")


@pytest.fixture(scope="module")
def cloned(
    short: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunSummary, Recorder]:
    """A run in which the advisor acts in the first round."""
    return play(CLONING, tmp_path_factory.mktemp("cloned") / "r")


def test_a_run_ends_as_if_it_had_never_stopped(
    learned: tuple[RunSummary, Recorder], tmp_path: Path
) -> None:
    stops = Does(round_ends(1), lambda: experiment.stop())
    experiment = Experiment(config(), tmp_path / "cut", callbacks=[stops])
    assert experiment.run().interrupted
    Experiment.resume(tmp_path / "cut").run()
    same_run(tmp_path / "cut", learned[0].folder)


def test_in_rounds_of_cloning_the_advisor_acts_on_hosts_that_all_differ(
    cloned: tuple[RunSummary, Recorder],
) -> None:
    seen = cloned[1]
    drawn = of_kind(seen, ContextDrawn)
    assert len({(event.source, event.price) for event in drawn[:4]}) == 4
    assert len({(event.source, event.price) for event in drawn[4:8]}) == 1
    # The advisor with the same first hosts, which are drawn for the same seed.
    with closing(VariedVectorEnv(CLONING)) as env:
        env.configure(grouped=False)
        rule = AdvisedController(env.action_spec, env.layout, 4)
        advised = play_round(env, rule, seed=CLONING.run.seed)
    (first, _) = of_kind(seen, RoundCompleted)
    assert first.mean_return == pytest.approx(float(np.mean(advised.returns)))


def test_a_run_that_stops_while_the_advisor_acts_goes_on_with_it(
    cloned: tuple[RunSummary, Recorder], tmp_path: Path
) -> None:
    stops = Does(within_round(1), stop)
    with suppress(KeyboardInterrupt):
        Experiment(CLONING, tmp_path / "cut", callbacks=[stops]).run()
    assert stops.did
    Experiment.resume(tmp_path / "cut").run()
    same_run(tmp_path / "cut", cloned[0].folder)


def test_cloning_is_refused_where_the_advisor_cannot_act(tmp_path: Path) -> None:
    planted = TrainingConfig.parse(
        {"task": {"name": "planted"}, "ppo": {"cloning_rounds": 1}}
    )
    with pytest.raises(ConfigError, match="the advisor widens layers"):
        Experiment(planted, tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_the_untrained_agent_is_validated_beside_rules_and_compared_by_return(
    learned: tuple[RunSummary, Recorder],
) -> None:
    summary, seen = learned
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
    view = open_run(summary.folder).view
    (words,) = lines(of_kind(seen, RoundCompleted)[-1], view, "")
    assert "not a number" not in words
    assert not view.has_baseline
    assert view.score == summary.score


def test_networks_that_are_drawn_are_trained_and_not_called_simulated(
    tmp_path: Path,
) -> None:
    summary, seen = play(config("none"), tmp_path / "r")
    (begun,) = of_kind(seen, RunStarted)
    assert begun.tier is not None
    view = open_run(tmp_path / "r").view
    assert not any("simulated" in line for line in lines(begun, view, ""))
    assert not view.own_loop
    # The size of hosts left alone is the mean over all rounds.
    assert summary.fossils == 0
    assert summary.host_parameters == round(summary.grown_parameters)


def test_a_rule_and_an_agent_play_the_same_contexts(
    learned: tuple[RunSummary, Recorder], tmp_path: Path
) -> None:
    """Hosts left alone have the same returns beside the agent in its run and in its evaluation."""
    evaluated = evaluate_controller(
        str(learned[0].folder), tmp_path / "e", changes={"run": {"evaluation_pairs": 4}}
    ).run()
    found = [host.accuracy for host in evaluated.hosts["none"]]
    rule, _ = play(config("advisor"), tmp_path / "rule")
    beside_rule, beside_agent = (
        next(c.pair for c in summary.comparisons if c.pair.name_b == "none")
        for summary in (rule, learned[0])
    )
    assert math.isfinite(beside_rule.mean_b)
    assert sum(found) / len(found) == pytest.approx(beside_agent.mean_b)


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
    learned: tuple[RunSummary, Recorder], tmp_path: Path
) -> None:
    found = evaluate_controller(
        str(learned[0].folder), tmp_path / "e", changes={"run": {"evaluation_pairs": 3}}
    ).run()
    assert found.pairs == 3
    assert not any("informed" in host.facts for host in found.hosts["greedy"])
