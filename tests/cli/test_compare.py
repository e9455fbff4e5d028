"""`esper compare` with arms of every kind, interrupted, resumed, and analysed again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper.config import ConfigError, TrainingConfig
from esper.env.make import EnvMaker
from esper.evaluation.runner import GrowingRunner
from esper.evaluation.statistics import MIN_PAIRS

Esper = Callable[..., Any]

PLANTED = ("--task", "planted", "--envs", "2", "--episode-length", "10")
TINY = (
    "--envs",
    "2",
    "--episode-length",
    "2",
    "--set",
    "task.samples_per_epoch=64",
    "--set",
    "env.baseline_episodes=1",
)


def results(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "results.json").read_text())
    return found


def test_arms_are_configs(esper: Esper) -> None:
    Path("slow.toml").write_text('[run]\ncontroller = "heuristic"\n[env]\nmax_seeds = 1\n')
    few = "few:controller=random,env.max_seeds=2,reward.mode=sparse"
    arms = ("--arm", "slow=slow.toml", "--arm", few, "--arm", "heuristic", "--arm", "no-growth")
    found = esper("compare", *PLANTED, *arms, "--pairs", "2", "--out", "out")
    assert (found.code, found.err) == (0, "")
    told = results("out")
    assert told["reference"] == "no-growth"
    arms_told = told["arms"]
    assert {name: arm["config"]["env"]["max_seeds"] for name, arm in arms_told.items()} == {
        "slow": 1,
        "few": 2,
        "heuristic": 3,
        "no-growth": 3,
    }
    assert [arms_told[name]["controller"] for name in ("slow", "few")] == ["heuristic", "random"]
    assert "Differences are arm minus no-growth" in found.out


@pytest.mark.finding("M14")
def test_by_default_there_are_pairs_enough_to_name_a_winner(esper: Esper, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def stands_in(_arms: Any, pairs: int, *_rest: Any) -> None:
        asked.append(pairs)
        raise ConfigError("enough seen")

    monkeypatch.setattr("esper.evaluation.comparison.ComparisonRun", stands_in)
    assert esper("compare", *PLANTED, "--arm", "none", "--arm", "random").code == 2
    assert asked[0] >= MIN_PAIRS
    assert TrainingConfig().run.evaluation_pairs >= MIN_PAIRS
    for name in ("digits", "chars", "planted"):
        config = TrainingConfig.parse({"task": {"name": name}, "run": {"controller": "random"}})
        made = EnvMaker.of(config).config
        assert int(made.run.rounds or 0) * int(made.env.n_envs or 0) >= MIN_PAIRS, name


def test_controls_are_made_for_the_arm_that_is_named(esper: Esper) -> None:
    arms = ("--arm", "random", "--arm", "heuristic", "--arm", "static", "--arm", "bigger", "--arm", "same-compute")
    found = esper("compare", *TINY, *arms, "--of", "heuristic", "--pairs", "1", "--out", "out")
    assert (found.code, found.err) == (0, "")
    assert {name: arm["of"] for name, arm in results("out")["arms"].items() if arm["of"]} == dict.fromkeys(
        ("static", "bigger", "same-compute"), "heuristic"
    )
    assert "static is made for each host of heuristic" in " ".join(found.out.split())
    compute = next(metric for metric in results("out")["metrics"] if metric["metric"] == "compute")
    assert compute["missing"] is None


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (OSError("the disk is gone"), 1)], ids=["ctrl-c", "error"]
)
def test_complete_pairs_are_reported_and_the_rest_is_resumed(
    error: BaseException, code: int, esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    play, calls = GrowingRunner.play, []

    def breaks(self: GrowingRunner, number: int, grown: Any = ()) -> Any:
        calls.append(number)
        if len(calls) == 4:
            raise error
        return play(self, number, grown)

    with monkeypatch.context() as patch:
        patch.setattr(GrowingRunner, "play", breaks)
        found = esper("compare", *PLANTED, "--arm", "random", "--arm", "none", "--pairs", "4", "--out", "out")
    assert found.code == code
    words = " ".join(found.out.split())
    assert "2 of 4 requested pairs" in words
    assert "Only 2 of 4 pairs are complete. To continue: esper compare --resume out" in words
    assert ("the disk is gone" in found.err) == (code == 1)
    assert results("out")["pairs"] == 2

    again = esper("compare", "--resume", "out")
    assert (again.code, again.err) == (0, "")
    assert results("out")["pairs"] == 4
    assert again.out.count("comparing, round") == 1
    esper("compare", *PLANTED, "--arm", "random", "--arm", "none", "--pairs", "4", "--out", "whole")
    assert results("out") == results("whole")


def test_without_a_complete_pair_the_resume_command_is_printed(esper: Esper, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: GrowingRunner, number: int, grown: Any = ()) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(GrowingRunner, "play", never)
    found = esper("compare", *PLANTED, "--arm", "random", "--arm", "none", "--out", "out")
    assert found.code == 130
    assert "No pair is complete in every arm yet. To continue: esper compare --resume out" in found.out


def test_a_comparison_is_analysed_again_with_another_reference(esper: Esper) -> None:
    esper("compare", *PLANTED, "--arm", "random", "--arm", "none", "--pairs", "2", "--out", "out")
    found = esper("compare", "--resume", "out", "--reference", "random")
    assert found.code == 0
    assert "Differences are arm minus random" in " ".join(found.out.split())
    assert "comparing" not in found.out
    refused = esper("compare", "--resume", "out", "--pairs", "3")
    assert refused.code == 2
    assert "only --reference, --json" in refused.err


@pytest.mark.parametrize(
    ("arms", "told"),
    [
        (("none", "static"), "static is made for an arm that grows hosts"),
        (("none", "a:controller=random,run.seed=1"), "run.seed"),
        (("none", "a:controller=random,reward.mode=greedy"), "arm 'a': reward.mode"),
        (("none", "ppo"), "ppo must be trained before it can be compared"),
        (("none", "a=b"), "NAME=FILE.toml"),
    ],
)
def test_arms_that_cannot_be_compared_are_refused(arms: tuple[str, ...], told: str, esper: Esper) -> None:
    options = [word for arm in arms for word in ("--arm", arm)]
    found = esper("compare", *TINY, "--seed", "0", *options)
    assert (found.code, found.out) == (2, "")
    assert told in found.err
    assert not list(Path().iterdir())
