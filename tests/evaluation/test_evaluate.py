"""Evaluation of trained agents on held-out hosts, greedy and stochastic, also on other tasks and widths."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esper.config import ConfigError, TrainingConfig
from esper.evaluation.comparison import compare_controllers
from esper.evaluation.evaluate import PolicyEvaluation, evaluate_controller, hosts_config
from esper.files import checkpoint
from esper.files.atomic import write_json
from esper.files.policy import SavedPolicy, find_policy, save_policy
from esper.run.experiment import RunSummary
from esper.telemetry.event import ArmPlayed
from esper.training.rng import HELD_OUT
from tests.core_helpers import digits
from tests.run.rank_helpers import ranks_of
from tests.run.run_helpers import births, learning, play, tiny

PRACTISED = {"practice_steps": 512}
"""A run too short to learn anything, but in which seeds are planted."""


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> RunSummary:
    """A run on digits, from the first host to the comparison on held-out ones."""
    config = learning(rounds=1, evaluation_pairs=3, ppo=PRACTISED)
    return play(config, tmp_path_factory.mktemp("runs") / "r")[0]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = learning("planted", n_envs=4, rounds=2)
    return play(config, tmp_path_factory.mktemp("runs") / "p")[0].folder


@pytest.fixture(scope="module")
def evaluated(learned: RunSummary) -> PolicyEvaluation:
    return evaluate_controller(str(learned.folder))


def test_an_evaluation_equals_the_final_comparison_of_the_run(learned: RunSummary, evaluated: PolicyEvaluation) -> None:
    """With the same seed and number of pairs, the hosts are the same, grown by the likeliest actions."""
    greedy, stochastic = (found.pair for found in evaluated.comparisons)
    run = learned.comparison
    assert (greedy.name_a, greedy.name_b, stochastic.name_a) == ("greedy", "none", "stochastic")
    assert greedy == replace(run, name_a="greedy")
    assert evaluated.pairs == 3
    alone, ours, _ = evaluated.arms
    assert alone.parameters.tolist() == [learned.host_parameters] * 3
    assert ours.parameters.mean() == learned.grown_parameters
    assert ours.fossils.mean() == learned.fossils


def test_greedy_is_the_checkpoint_as_others_play_it(learned: RunSummary, evaluated: PolicyEvaluation) -> None:
    config = find_policy(str(learned.folder)).config
    assert config is not None
    arms = compare_controllers(config, [f"checkpoint:{learned.folder}", "none"], pairs=3)
    for theirs, ours in zip(arms, (evaluated.arms[1], evaluated.arms[0]), strict=True):
        np.testing.assert_array_equal(theirs.accuracy, ours.accuracy)


@pytest.mark.slow
def test_stochastic_draws_and_draws_the_same_again(simulated: Path) -> None:
    changes = {"run": {"evaluation_pairs": 8}}
    first, second = (evaluate_controller(str(simulated), changes=changes) for _ in range(2))
    for one, other in zip(first.arms, second.arms, strict=True):
        np.testing.assert_array_equal(one.accuracy, other.accuracy)
    assert first.arms[1].accuracy.tolist() != first.arms[2].accuracy.tolist()


@pytest.mark.trap(28)
def test_evaluated_hosts_were_never_learned_from(learned: RunSummary, monkeypatch: pytest.MonkeyPatch) -> None:
    born = births(monkeypatch)
    heard: list[ArmPlayed] = []
    changes = {"run": {"seed": 11, "evaluation_pairs": 2}}
    evaluate_controller(str(learned.folder), changes=changes, progress=heard.append)
    played = [host for host in born if host[1] < 1_000]  # the others are those of the baseline
    assert sorted(played) == sorted([(11 + HELD_OUT, env, 0) for env in range(2)] * 3)
    assert {seed for seed, _, _ in born} == {11, 11 + HELD_OUT}
    assert sorted(event.controller for event in heard) == ["greedy", "none", "stochastic"]


def test_hosts_of_another_width_are_played(learned: RunSummary) -> None:
    found = evaluate_controller(str(learned.folder), width=5, changes={"run": {"evaluation_pairs": 2}})
    assert found.width == 5
    # Convolutions 9·5 + 9·5·10, norms 2·(5 + 10), head 10·10 + 10; the task's width, 3, gives 277.
    assert found.arms[0].parameters.tolist() == [635.0] * 2
    own = find_policy(str(learned.folder)).config
    assert own is not None
    assert found.config.task.model_dump() == own.task.model_dump()


def test_two_ranks_evaluate_what_one_process_does(learned: RunSummary) -> None:
    """This holds for hosts of another width and after exploration, too."""
    settings: dict[str, Any] = {"width": 5, "explore": 1, "changes": {"run": {"evaluation_pairs": 2}}}
    alone = evaluate_controller(str(learned.folder), **settings)
    with ranks_of(2) as ranks:
        spread = evaluate_controller(str(learned.folder), **settings, ranks=ranks)
    assert [arm.controller for arm in alone.arms] == ["none", "greedy", "stochastic", "plans"]
    assert spread.plain() == alone.plain()


@pytest.mark.parametrize("width", [0, -1])
def test_a_width_that_cannot_be_is_refused(width: int, learned: RunSummary) -> None:
    with pytest.raises(ConfigError, match=f"this task's host cannot have width {width}: give 1 or more; it has 3"):
        evaluate_controller(str(learned.folder), width=width)


def test_hosts_without_a_width_are_refused(simulated: Path, learned: RunSummary) -> None:
    with pytest.raises(ConfigError, match="hosts of planted are simulated and have no width"):
        evaluate_controller(str(simulated), width=5)
    from torch import nn

    import esper

    def build() -> Any:
        return esper.graft(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 10)), {"r0c0": "0"})

    base = digits()
    task = esper.Task("mine", 10, build, base.train, base.validation, base.test)
    with pytest.raises(ConfigError, match="cannot widen a GraftedHost"):
        evaluate_controller(str(learned.folder), task=task, width=5)


def test_a_width_that_heads_do_not_divide_is_refused(learned: RunSummary) -> None:
    with pytest.raises(ConfigError, match="give a multiple of 4; it has 64"):
        evaluate_controller(str(learned.folder), task="chars", width=62)


@pytest.mark.slow
def test_another_task_is_played_with_its_own_sizes(learned: RunSummary) -> None:
    source = find_policy(str(learned.folder))
    assert source.config is not None
    config = hosts_config(source, "chars", {"env": {"episode_length": 2}})
    assert config.task == TrainingConfig.parse({"task": {"name": "chars"}}).task
    assert (config.env.n_envs, config.env.episode_length) == (None, 2)
    assert config.env.baseline_episodes == source.config.env.baseline_episodes == 1
    small = {"samples_per_epoch": 16}
    found = evaluate_controller(
        str(learned.folder),
        task="chars",
        changes={"task": small, "env": {"episode_length": 2}, "run": {"evaluation_pairs": 1}},
    )
    assert found.config.task.name == "chars"
    assert found.config.task.batch_size == 8  # that of chars
    assert not found.informed
    assert found.pairs == 1


def test_a_policy_plays_another_task_with_unknown_blueprints(simulated: Path) -> None:
    small = {"run": {"evaluation_pairs": 2}, "env": {"n_envs": 2, "episode_length": 2, "baseline_episodes": 1}}
    found = evaluate_controller(
        str(simulated), task="digits", changes={**small, "task": {"samples_per_epoch": 64}}, explore=1
    )
    assert [arm.controller for arm in found.arms] == ["none", "greedy", "stochastic", "plans"]
    assert found.informed


def test_a_task_that_is_given_is_played(learned: RunSummary) -> None:
    base = digits()
    small = {"run": {"evaluation_pairs": 1}, "env": {"episode_length": 2}, "task": {"samples_per_epoch": 64}}
    found = evaluate_controller(str(learned.folder), task=replace(base, name="mine"), changes=small)
    assert found.config.task.name == "mine"


@pytest.mark.parametrize("form", ["folder", "checkpoint", "prefix", "file"])
def test_all_names_of_a_run_mean_the_same(form: str, simulated: Path, tmp_path: Path) -> None:
    if form == "file":
        save_policy(simulated, tmp_path / "a.safetensors")
    name = {
        "folder": str(simulated),
        "checkpoint": str(simulated / checkpoint.NAME),
        "prefix": f"checkpoint:{simulated}",
        "file": str(tmp_path / "a.safetensors"),
    }[form]
    found, wanted = find_policy(name), find_policy(str(simulated))
    assert (found.config, found.rounds, found.origin) == (wanted.config, 2, wanted.origin)
    assert found.origin == "learned on planted, 2 of 2 rounds, best after round 2, seed 7"
    arms = [evaluate_controller(source, changes={"run": {"evaluation_pairs": 4}}).arms for source in (found, wanted)]
    for one, other in zip(*arms, strict=True):
        np.testing.assert_array_equal(one.accuracy, other.accuracy)


def test_a_checkpoint_outside_its_folder_needs_a_task(simulated: Path, tmp_path: Path) -> None:
    """A config in the same folder is not that of the checkpoint."""
    lone = tmp_path / "lone.pt"
    lone.write_bytes((simulated / checkpoint.NAME).read_bytes())
    (tmp_path / "config.toml").write_text("[task]\nname = 'digits'\n")
    with pytest.raises(ConfigError, match=r"lone\.pt is not in a run folder .*: name the task with --task"):
        evaluate_controller(str(lone))
    small = {"run": {"evaluation_pairs": 2}, "env": {"n_envs": 2, "episode_length": 4}}
    found = evaluate_controller(str(lone), task="planted", changes=small)
    assert (found.pairs, found.origin) == (2, "")


def test_a_run_that_played_a_saved_policy_can_be_evaluated(simulated: Path, tmp_path: Path) -> None:
    config = learning("planted", n_envs=4, rounds=1, controller=f"checkpoint:{simulated}", evaluation_pairs=2)
    played = play(config, tmp_path / "played")[0].folder
    found = find_policy(str(played))
    assert found.origin == f"played as checkpoint:{simulated} on planted"
    assert evaluate_controller(found).pairs == 2


def test_a_run_that_learned_nothing_says_what_can_be_evaluated(tmp_path: Path) -> None:
    folder = play(tiny("random"), tmp_path / "r")[0].folder
    with pytest.raises(ConfigError, match="contains no policy: its controller random does not learn") as e:
        evaluate_controller(str(folder))
    for word in ("esper compare", "ppo run", "checkpoint.pt", ".safetensors", "pretrained"):
        assert word in str(e.value)


@pytest.mark.parametrize("name", ["gone", "gone.safetensors", "gone/checkpoint.pt"])
def test_a_missing_policy_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"(no checkpoint|no policy) at {name}"):
        evaluate_controller(name)


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
    changes: dict[str, Any], message: str, simulated: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate_controller(str(simulated), changes=changes)


def test_a_task_that_is_not_known_is_refused(simulated: Path) -> None:
    with pytest.raises(ConfigError, match="unknown task 'nope'; known: digits"):
        evaluate_controller(str(simulated), task="nope")


def test_user_code_runs_only_if_it_is_named() -> None:
    config = learning().with_values(task={"name": "there/mine.py:make_task", "batch_size": 32})
    learned = SavedPolicy("runs/a", {}, {}, config, 3, None)
    with pytest.raises(ConfigError, match=r"runs/a names the task 'there/mine\.py:make_task', which is Python code"):
        hosts_config(learned, None, {})
    moved = hosts_config(learned, "here/mine.py:make_task", {})
    assert (moved.task.name, moved.task.batch_size) == ("here/mine.py:make_task", 32)
    other = hosts_config(learned, "here/mine.py:another", {})
    assert (other.task.name, other.task.batch_size) == ("here/mine.py:another", None)


def test_the_json_contains_all_results(evaluated: PolicyEvaluation, tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", evaluated.plain())
    found = json.loads((tmp_path / "a.json").read_text())
    assert (found["task"], found["width"], found["seed"], found["pairs"]) == ("digits", None, 7, 3)
    assert found["origin"] == "learned on digits, 1 of 1 rounds, best after round 1, seed 7"
    for arm in evaluated.arms:
        values = found["arms"][arm.controller]
        assert values["accuracy"] == arm.accuracy.tolist()
        assert found["means"][arm.controller]["accuracy"] == pytest.approx(np.mean(values["accuracy"]))
        assert found["means"][arm.controller]["parameters"] == pytest.approx(np.mean(values["parameters"]))
        assert found["means"][arm.controller]["seeds_kept"] == pytest.approx(np.mean(values["seeds_kept"]))
    for compared in evaluated.comparisons:
        means = found["means"][compared.pair.name_a]
        assert means["difference"] == compared.pair.difference
        assert means["interval"] == list(compared.pair.interval)
        assert means["p"] == compared.adjusted_p
        assert means["verdict"] == "inconclusive: under 10 pairs"
    assert TrainingConfig.parse(found["config"]).model_dump() == evaluated.config.model_dump()
