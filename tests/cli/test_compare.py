"""`esper compare` with arms of every kind, interrupted, resumed, and analysed again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from esper.compare.runner import GrowingRunner
from esper.compare.statistics import MIN_PAIRS
from esper.config import ConfigError, TrainingConfig
from esper.env.make import EnvMaker
from esper.run.trainer import Trainer
from tests.cli.conftest import TWO_EPOCHS, Esper

pytestmark = pytest.mark.usefixtures("no_plots")

PLANTED = ("--task", "planted", "--envs", "2", "--episode-length", "10")


def results(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "results.json").read_text())
    return found


def test_arms_are_configs(esper: Esper) -> None:
    Path("slow.toml").write_text(
        '[run]\ncontroller = "heuristic"\n[env]\nmax_seeds = 1\n'
    )
    few = "few:controller=random,env.max_seeds=2,reward.mode=sparse"
    arms = (
        "--arm",
        "slow=slow.toml",
        "--arm",
        few,
        "--arm",
        "heuristic",
        "--arm",
        "no-growth",
    )
    found = esper("compare", *PLANTED, *arms, "--pairs", "2", "--out", "out")
    assert (found.code, found.err) == (0, "")
    told = results("out")
    assert told["reference"] == "no-growth"
    arms_told = told["arms"]
    assert {
        name: arm["config"]["env"]["max_seeds"] for name, arm in arms_told.items()
    } == {
        "slow": 1,
        "few": 2,
        "heuristic": 3,
        "no-growth": 3,
    }
    assert [arms_told[name]["controller"] for name in ("slow", "few")] == [
        "heuristic",
        "random",
    ]
    assert "Differences are arm minus no-growth" in found.out


@pytest.mark.finding("M14")
def test_by_default_there_are_pairs_enough_to_name_a_winner(
    esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def stands_in(_arms: Any, pairs: int, *_rest: Any, **_named: Any) -> None:
        asked.append(pairs)
        raise ConfigError("enough seen")

    monkeypatch.setattr("esper.compare.comparison_run.ComparisonRun", stands_in)
    assert esper("compare", *PLANTED, "--arm", "none", "--arm", "random").code == 2
    assert asked[0] >= MIN_PAIRS
    assert TrainingConfig().run.evaluation_pairs >= MIN_PAIRS
    for name in ("digits", "chars", "planted"):
        config = TrainingConfig.parse(
            {"task": {"name": name}, "run": {"controller": "random"}}
        )
        made = EnvMaker.of(config).config
        assert int(made.run.rounds or 0) * int(made.env.n_envs or 0) >= MIN_PAIRS, name


@pytest.mark.slow
def test_controls_are_made_for_the_arm_that_is_named(esper: Esper) -> None:
    arms = (
        "--arm",
        "random",
        "--arm",
        "heuristic",
        "--arm",
        "static",
        "--arm",
        "bigger",
        "--arm",
        "same-compute",
    )
    found = esper(
        "compare",
        *TWO_EPOCHS,
        *arms,
        "--of",
        "heuristic",
        "--pairs",
        "1",
        "--out",
        "out",
    )
    assert (found.code, found.err) == (0, "")
    assert {
        name: arm["of"] for name, arm in results("out")["arms"].items() if arm["of"]
    } == dict.fromkeys(("static", "bigger", "same-compute"), "heuristic")
    assert "static is made for each host of heuristic" in " ".join(found.out.split())
    compute = next(
        metric for metric in results("out")["metrics"] if metric["metric"] == "compute"
    )
    assert compute["missing"] is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        pytest.param(OSError("the disk is gone"), 1, marks=pytest.mark.slow),
    ],
    ids=["ctrl-c", "error"],
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
        found = esper(
            "compare",
            *PLANTED,
            "--arm",
            "random",
            "--arm",
            "none",
            "--pairs",
            "4",
            "--out",
            "out",
        )
    assert found.code == code
    words = " ".join(found.out.split())
    assert "2 of 4 requested pairs" in words
    assert (
        "Only 2 of 4 pairs are complete. To continue: esper compare --resume out"
        in words
    )
    assert ("the disk is gone" in found.err) == (code == 1)
    assert results("out")["pairs"] == 2

    again = esper("compare", "--resume", "out")
    assert (again.code, again.err) == (0, "")
    assert results("out")["pairs"] == 4
    assert again.out.count("comparing, round") == 1
    esper(
        "compare",
        *PLANTED,
        "--arm",
        "random",
        "--arm",
        "none",
        "--pairs",
        "4",
        "--out",
        "whole",
    )
    assert results("out") == results("whole")


def test_without_a_complete_pair_the_resume_command_is_printed(
    esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: GrowingRunner, number: int, grown: Any = ()) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(GrowingRunner, "play", never)
    found = esper(
        "compare", *PLANTED, "--arm", "random", "--arm", "none", "--out", "out"
    )
    assert found.code == 130
    assert (
        "No pair is complete in every arm yet. To continue: esper compare --resume out"
        in found.out
    )


LEARNING = (
    *PLANTED,
    "--arm",
    "ppo",
    "--arm",
    "ppo:reward.mode=sparse",
    "--pairs",
    "2",
    "--set",
    "ppo.width=16",
)


def test_arms_that_learn_are_trained_with_several_seeds(esper: Esper) -> None:
    found = esper(
        "compare", *LEARNING, "--rounds", "1", "--train-seeds", "2", "--out", "out"
    )
    assert (found.code, found.err) == (0, "")
    words = " ".join(found.out.split())
    assert "2 training seeds of 2 hosts each" in words
    assert "Fewer than 5 training seeds are always inconclusive." in words
    assert "The unit of evidence is the training seed" in words
    assert "training seed 1, round 1/1: ppo" in words
    assert (results("out")["pairs"], results("out")["train_seeds"]) == (4, 2)
    again = esper("compare", "--resume", "out", "--reference", "ppo")
    assert (again.code, again.err) == (0, "")
    assert "Differences are arm minus ppo." in " ".join(again.out.split())
    assert esper("show", "out/seed-1/0-ppo").code == 0


@pytest.mark.slow
def test_an_interrupted_training_is_resumed(
    esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: Trainer) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "play_round", never)
        found = esper(
            "compare", *LEARNING, "--rounds", "1", "--train-seeds", "1", "--out", "out"
        )
    assert found.code == 130
    assert (
        "No training seed is complete in every arm yet. To continue: esper compare --resume out"
        in found.out
    )
    assert esper("compare", "--resume", "out").code == 0
    assert results("out")["train_seeds"] == 1


@pytest.mark.parametrize("options", [("--part", "1/2"), ("--merge", "p1", "p2")])
def test_parts_are_refused_with_what_to_use_instead(
    options: tuple[str, ...], esper: Esper
) -> None:
    found = esper("compare", *options, "--arm", "none", "--arm", "random")
    assert found.code == 2
    assert f"{options[0]} is gone: torchrun spreads hosts" in found.err
    assert "--train-seeds 1" in found.err
    assert not list(Path().iterdir())


@pytest.mark.parametrize("option", ["--train-seeds", "--rounds"])
def test_options_of_learning_need_an_arm_that_learns(option: str, esper: Esper) -> None:
    found = esper("compare", *PLANTED, "--arm", "none", "--arm", "random", option, "3")
    assert (found.code, found.out) == (2, "")
    assert (
        f"{option} is for arms that learn, and no arm does; add one, such as --arm ppo"
        in found.err
    )


@pytest.mark.slow
def test_the_report_says_that_an_agent_was_trained_once(esper: Esper) -> None:
    found = esper(
        "compare",
        *TWO_EPOCHS,
        "--arm",
        "pretrained",
        "--arm",
        "none",
        "--pairs",
        "1",
        "--out",
        "out",
    )
    assert (found.code, found.err) == (0, "")
    note = (
        "pretrained: trained once, so the intervals leave out the spread of training."
    )
    assert note in " ".join(found.out.split())
    assert results("out")["notes"] == [note]


@pytest.mark.parametrize(
    ("arms", "told"),
    [
        (("none", "static"), "static is made for an arm that grows hosts"),
        (("none", "a:controller=random,run.seed=1"), "run.seed"),
        (("none", "a:controller=random,reward.mode=greedy"), "arm 'a': reward.mode"),
        (("none", "ppo:ppo.gamma=0.9"), "arm 'ppo:ppo.gamma=0.9': ppo.gamma is 0.9"),
        (("none", "a=b"), "NAME=FILE.toml"),
    ],
)
def test_arms_that_cannot_be_compared_are_refused(
    arms: tuple[str, ...], told: str, esper: Esper
) -> None:
    options = [word for arm in arms for word in ("--arm", arm)]
    found = esper("compare", *TWO_EPOCHS, "--seed", "0", *options)
    assert (found.code, found.out) == (2, "")
    assert told in found.err
    assert not list(Path().iterdir())
