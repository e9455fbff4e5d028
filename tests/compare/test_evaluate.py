"""Evaluation of trained agents on held-out hosts, greedy and stochastic, also on other tasks and widths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esper.compare.comparison import ComparisonResult
from esper.compare.comparison_run import ComparisonRun
from esper.compare.evaluate import evaluate_controller, hosts_config
from esper.config import ConfigError
from esper.files import checkpoint
from esper.files.policy import SavedPolicy, find_policy, save_policy
from esper.run.experiment import RunSummary
from esper.telemetry.event import ArmPlayed
from esper.training.rng import HELD_OUT
from tests.core_helpers import digits
from tests.run.run_helpers import births, learning, play


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> RunSummary:
    """A run on digits, from the first host to the comparison on held-out ones."""
    config = learning(rounds=1, evaluation_pairs=2)
    return play(config, tmp_path_factory.mktemp("runs") / "r")[0]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = learning("planted", n_envs=4, rounds=2)
    return play(config, tmp_path_factory.mktemp("runs") / "p")[0].folder


def evaluate(controller: Any, folder: Path, **settings: Any) -> ComparisonResult:
    return evaluate_controller(controller, folder, **settings).run()


def accuracy(result: ComparisonResult, arm: str) -> list[float]:
    return [host.accuracy for host in result.hosts[arm]]


@pytest.fixture(scope="module")
def evaluated(
    learned: RunSummary, tmp_path_factory: pytest.TempPathFactory
) -> ComparisonResult:
    return evaluate(str(learned.folder), tmp_path_factory.mktemp("evaluated") / "o")


def test_an_evaluation_equals_the_final_comparison_of_the_run(
    learned: RunSummary, evaluated: ComparisonResult
) -> None:
    """With the same seed and number of pairs, the hosts are the same, grown by the likeliest actions."""
    greedy = evaluated.metrics[0].comparisons["greedy"].pair
    assert list(evaluated.hosts) == ["none", "greedy", "stochastic"]
    assert greedy == replace(learned.comparison, name_a="greedy")
    assert evaluated.pairs == 2
    assert [host.parameters for host in evaluated.hosts["none"]] == [
        learned.host_parameters
    ] * 2
    ours = evaluated.hosts["greedy"]
    assert np.mean([host.parameters for host in ours]) == learned.grown_parameters
    assert np.mean([host.fossils for host in ours]) == learned.fossils


@pytest.mark.slow
def test_hosts_of_another_width_are_played_and_resumed(
    learned: RunSummary, tmp_path: Path
) -> None:
    comparison = evaluate_controller(
        str(learned.folder),
        tmp_path / "o",
        width=5,
        changes={"run": {"evaluation_pairs": 1}},
    )
    found = comparison.run()
    own = find_policy(str(learned.folder)).config
    assert own is not None
    assert found.arms[0].config.task.model_dump() == own.task.model_dump()
    # Convolutions 9·5 + 9·5·10, norms 2·(5 + 10), head 10·10 + 10; the task's width, 3, gives 277.
    assert {host.parameters for host in found.hosts["none"]} == {635.0}
    resumed = ComparisonRun.resume(tmp_path / "o", reference="greedy")
    assert (found.width, resumed.width, resumed.run().width) == (5, 5, 5)
    assert resumed.first.task is not None
    assert resumed.first.task.new_host().parameter_count == 635


@pytest.mark.trap(28)
def test_evaluated_hosts_were_never_learned_from(
    learned: RunSummary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    born = births(monkeypatch)
    heard: list[ArmPlayed] = []
    changes = {"run": {"seed": 11, "evaluation_pairs": 2}}
    evaluate(
        str(learned.folder), tmp_path / "o", changes=changes, progress=heard.append
    )
    # The others are those of the baseline, and stand-ins on which operations are counted.
    played = [host for host in born if host[1] < 1_000 and host[0] != 0]
    assert sorted(played) == sorted([(11 + HELD_OUT, env, 0) for env in range(2)] * 3)
    assert {seed for seed, _, _ in born} == {0, 11, 11 + HELD_OUT}
    assert sorted(event.controller for event in heard) == [
        "greedy",
        "none",
        "stochastic",
    ]


def test_a_width_that_cannot_be_is_refused(learned: RunSummary, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="this task's host cannot have width 0: give 1 or more; it has 3",
    ):
        evaluate(str(learned.folder), tmp_path / "o", width=0)


def test_hosts_without_a_width_are_refused(
    simulated: Path, learned: RunSummary, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="hosts of planted have no width to be set"):
        evaluate(str(simulated), tmp_path / "o", width=5)
    from torch import nn

    import esper

    def build() -> Any:
        return esper.graft(
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 10)),
            {"r0c0": "0"},
        )

    base = digits()
    task = esper.Task("mine", 10, build, base.train, base.validation, base.test)
    with pytest.raises(ConfigError, match="give a multiple of 4; it has 64"):
        evaluate(str(learned.folder), tmp_path / "o", task="chars", width=62)
    with pytest.raises(ConfigError, match="cannot widen a GraftedHost"):
        evaluate(str(learned.folder), tmp_path / "o", task=task, width=5)


@pytest.mark.parametrize("form", ["folder", "checkpoint", "prefix", "file"])
def test_all_names_of_a_run_mean_the_same(
    form: str, simulated: Path, tmp_path: Path
) -> None:
    if form == "file":
        save_policy(simulated, tmp_path / "a.safetensors")
    name = {
        "folder": str(simulated),
        "checkpoint": str(simulated / checkpoint.NAME),
        "prefix": f"checkpoint:{simulated}",
        "file": str(tmp_path / "a.safetensors"),
    }[form]
    found, wanted = find_policy(name), find_policy(str(simulated))
    assert (found.config, found.rounds, found.origin) == (
        wanted.config,
        2,
        wanted.origin,
    )
    assert found.origin == "learned on planted, 2 of 2 rounds, seed 7"
    ours, theirs = found.state["network"], wanted.state["network"]
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())


def test_a_checkpoint_outside_its_folder_needs_a_task(
    simulated: Path, tmp_path: Path
) -> None:
    """A config in the same folder is not that of the checkpoint."""
    lone = tmp_path / "lone.pt"
    lone.write_bytes((simulated / checkpoint.NAME).read_bytes())
    (tmp_path / "config.toml").write_text("[task]\nname = 'digits'\n")
    with pytest.raises(
        ConfigError,
        match=r"lone\.pt is not in a run folder .*: name the task with --task",
    ):
        evaluate(str(lone), tmp_path / "o")
    small = {"run": {"evaluation_pairs": 2}, "env": {"n_envs": 2, "episode_length": 4}}
    assert evaluate(str(lone), tmp_path / "o", task="planted", changes=small).pairs == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": {"name": "chars"}}, "task.name has no effect here"),
        ({"run": {"controller": "none"}}, "run.controller has no effect here"),
        ({"run": {"rounds": 3}}, "run.rounds has no effect here"),
        ({"run": {"checkpoint_every": 3}}, "run.checkpoint_every has no effect here"),
        ({"ppo": {"width": 3}}, "ppo.width has no effect here"),
        ({"run": {"evaluation_pairs": 0}}, "run.evaluation_pairs"),
        ({"run": {"device": "cuda:99"}}, "device 'cuda:99' is not available"),
        ({"run": 3}, "run: "),
        ({"nope": {"x": 1}}, "unknown key nope"),
        ({"env": {"nope": 1}}, "unknown key env.nope"),
    ],
)
def test_a_value_that_is_wrong_or_without_effect_is_refused(
    changes: dict[str, Any], message: str, simulated: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(str(simulated), tmp_path / "o", changes=changes)


def test_user_code_runs_only_if_it_is_named() -> None:
    config = learning().with_values(
        task={"name": "there/mine.py:make_task", "batch_size": 32}
    )
    learned = SavedPolicy("runs/a", {}, (), (), config, 3, None)
    with pytest.raises(
        ConfigError,
        match=r"runs/a names the task 'there/mine\.py:make_task', which is Python code",
    ):
        hosts_config(learned, None, {})
    moved = hosts_config(learned, "here/mine.py:make_task", {})
    assert (moved.task.name, moved.task.batch_size) == ("here/mine.py:make_task", 32)
    other = hosts_config(learned, "here/mine.py:another", {})
    assert (other.task.name, other.task.batch_size) == ("here/mine.py:another", None)


def test_the_score_has_all_but_the_hosts(evaluated: ComparisonResult) -> None:
    score = evaluated.score()
    assert (score["task"], score["width"], score["seed"], score["pairs"]) == (
        "digits",
        None,
        7,
        2,
    )
    assert score["metrics"][0] == evaluated.metrics[0].plain()
    assert {"arms", "environment"} == set(evaluated.plain()) - set(score)
