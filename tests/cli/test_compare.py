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
from tests.cli.conftest import SIMULATED, Esper

pytestmark = pytest.mark.usefixtures("no_plots")


def results(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(folder) / "results.json").read_text())
    return found


def _refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is no JSON")


def test_a_comparison_prints_a_row_an_arm_and_a_verdict_a_comparison(
    esper: Esper,
) -> None:
    Path("slow.toml").write_text(
        '[run]\ncontroller = "heuristic"\n[env]\nmax_seeds = 1\n'
    )
    few = "few:controller=random,env.max_seeds=2,reward.mode=sparse"
    arms = ("--arm", "slow=slow.toml", "--arm", "none", "--arm", few)
    size = ("--pairs", "3", "--episode-length", "16")
    found = esper(
        "compare", *SIMULATED, *arms, *size, "--out", "out", "--json", "o.json"
    )
    assert (found.code, found.err) == (0, "")
    told = json.loads(Path("o.json").read_text(), parse_constant=_refuse)
    assert told == results("out")
    assert (told["reference"], told["pairs"]) == ("none", 3)
    seeds = {
        name: arm["config"]["env"]["max_seeds"] for name, arm in told["arms"].items()
    }
    assert seeds == {"slow": 1, "none": 3, "few": 2}
    lines = found.out.splitlines()
    for name, arm in told["arms"].items():
        assert any(line.split()[:1] == [name] for line in lines)
        assert f" {sum(arm['values']['test_accuracy']) / 3:.2f}" in found.out
    words = " ".join(found.out.split())
    assert "3 pairs" in words
    assert (
        "Differences are arm minus none" in words
    )  # the reference, wherever it was named
    assert "2 comparisons per metric (Holm)" in words
    assert found.out.count("inconclusive: under 10 pairs") == 2
    assert max(len(line) for line in lines if not line.startswith("Written")) <= 80


def test_a_single_pair_has_neither_spread_nor_interval(esper: Esper) -> None:
    """JSON has neither NaN nor Infinity."""
    arms = ("--arm", "random", "--arm", "none", "--pairs", "1")
    found = esper("compare", *SIMULATED, *arms, "--json", "o.json")
    assert found.code == 0
    for word in ("nan", "inf", "1 pairs"):
        assert word not in found.out
    assert json.loads(Path("o.json").read_text(), parse_constant=_refuse)["pairs"] == 1


@pytest.mark.finding("M14")
def test_by_default_there_are_pairs_enough_to_name_a_winner(
    esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def stands_in(_arms: Any, pairs: int, *_rest: Any, **_named: Any) -> None:
        asked.append(pairs)
        raise ConfigError("enough seen")

    monkeypatch.setattr("esper.compare.comparison_run.ComparisonRun", stands_in)
    assert esper("compare", *SIMULATED, "--arm", "none", "--arm", "random").code == 2
    assert asked[0] >= MIN_PAIRS
    assert TrainingConfig().run.evaluation_pairs >= MIN_PAIRS
    for name in ("digits", "chars", "planted"):
        config = TrainingConfig.parse(
            {"task": {"name": name}, "run": {"controller": "random"}}
        )
        made = EnvMaker.of(config).config
        assert int(made.run.rounds or 0) * int(made.env.n_envs or 0) >= MIN_PAIRS, name


def test_complete_pairs_are_reported_and_the_rest_is_resumed(
    esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = ("--arm", "random", "--arm", "none", "--pairs", "4")
    play, calls = GrowingRunner.play, []

    def breaks(self: GrowingRunner, number: int, grown: Any = ()) -> Any:
        calls.append(number)
        if len(calls) == 4:
            raise OSError("the disk is gone")
        return play(self, number, grown)

    with monkeypatch.context() as patch:
        patch.setattr(GrowingRunner, "play", breaks)
        found = esper("compare", *SIMULATED, *arms, "--out", "out")
    assert found.code == 1
    assert "the disk is gone" in found.err
    words = " ".join(found.out.split())
    assert "2 of 4 requested pairs" in words
    assert (
        "Only 2 of 4 pairs are complete. To continue: esper compare --resume out"
        in words
    )
    assert results("out")["pairs"] == 2

    again = esper("compare", "--resume", "out")
    assert (again.code, again.err) == (0, "")
    assert results("out")["pairs"] == 4
    assert again.out.count("comparing, round") == 1
    esper("compare", *SIMULATED, *arms, "--out", "whole")
    assert results("out") == results("whole")


def test_without_a_complete_pair_the_resume_command_is_printed(
    esper: Esper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: GrowingRunner, number: int, grown: Any = ()) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(GrowingRunner, "play", never)
    found = esper(
        "compare", *SIMULATED, "--arm", "random", "--arm", "none", "--out", "out"
    )
    assert found.code == 130
    assert (
        "No pair is complete in every arm yet. To continue: esper compare --resume out"
        in found.out
    )


LEARNING = (
    *SIMULATED,
    "--arm",
    "ppo",
    "--arm",
    "ppo:reward.mode=sparse",
    "--pairs",
    "2",
    "--set",
    "ppo.width=16",
    "--set",
    "ppo.update_epochs=1",
)


@pytest.mark.slow
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


@pytest.mark.parametrize("option", ["--train-seeds", "--rounds"])
def test_options_of_learning_need_an_arm_that_learns(option: str, esper: Esper) -> None:
    found = esper(
        "compare", *SIMULATED, "--arm", "none", "--arm", "random", option, "3"
    )
    assert (found.code, found.out) == (2, "")
    assert (
        f"{option} is for arms that learn, and no arm does; add one, such as --arm ppo"
        in found.err
    )
