"""Comparisons of arms that learn: fair, the same as runs of their own, and never lost."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.compare.arms import read_arms
from esper.compare.comparison import ComparisonResult
from esper.compare.comparison_run import ComparisonRun
from esper.config import ConfigError, TrainingConfig
from esper.config.files import read_toml
from esper.files import checkpoint
from esper.run.experiment import Experiment
from esper.run.rollout import Collector
from esper.telemetry.event import RoundCompleted

ARMS = ("ppo", "ppo:reward.mode=sparse", "none")
FOLDERS = ("0-ppo", "1-ppo-reward.mode=sparse")
BASE: dict[str, Any] = {
    "task": {"name": "planted"},
    "env": {"n_envs": 2, "episode_length": 4},
    "run": {"seed": 4, "rounds": 2},
    "ppo": {"width": 8, "update_epochs": 1, "n_minibatches": 1},
}


def compare(
    folder: Path, *texts: str, train_seeds: int = 2, pairs: int = 3, **rest: Any
) -> ComparisonRun:
    return ComparisonRun(
        read_arms(texts or ARMS, BASE), pairs, folder, train_seeds=train_seeds, **rest
    )


def values(result: ComparisonResult | None) -> dict[str, Any]:
    """Every host of every arm; as text, since no number is equal to NaN."""
    assert result is not None
    return {
        name: [repr(host) for host in hosts] for name, hosts in result.hosts.items()
    }


def learned(folder: Path) -> dict[str, torch.Tensor]:
    """Weights of the agent in a run folder."""
    weights: dict[str, torch.Tensor] = checkpoint.read(folder)["policy"]["network"]
    return weights


def same_agents(one: Path, other: Path) -> None:
    ours, theirs = learned(one), learned(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


@dataclass(frozen=True)
class Whole:
    """A comparison that was never interrupted."""

    folder: Path
    result: ComparisonResult
    turns: list[tuple[str, int, int]]
    """Arm, training seed and number of each round that was learned from."""
    killed: Path
    """A copy of the folder after the last round of one arm: what a process leaves that is killed there."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder, killed, turns = (
        (root := tmp_path_factory.mktemp("whole")) / "o",
        root / "killed",
        [],
    )

    def listen(arm: str, seed: int, event: RoundCompleted) -> None:
        turns.append((arm, seed, event.round))
        if (arm, seed, event.round) == (ARMS[1], 4, 2):
            shutil.copytree(folder, killed)

    return Whole(folder, compare(folder, learned=listen).run(), turns, killed)


def test_every_training_seed_has_its_agents_and_its_hosts(whole: Whole) -> None:
    result = whole.result
    assert (
        result.train_seeds,
        result.requested_seeds,
        result.pairs,
        result.reference,
    ) == (2, 2, 6, "none")
    assert {name: len(hosts) for name, hosts in result.hosts.items()} == dict.fromkeys(
        ARMS, 6
    )
    told = json.loads((result.folder / "results.json").read_text())
    assert (told["train_seeds"], told["train_seeds_asked"]) == (2, 2)
    assert told["notes"] == ["Fewer than 5 training seeds are always inconclusive."]
    assert {
        found["word"] for metric in told["metrics"] for found in metric["comparisons"]
    } == {"inconclusive"}


def test_an_arm_learns_what_a_run_of_its_own_would(
    whole: Whole, tmp_path: Path
) -> None:
    seed = 5
    config = TrainingConfig.parse(BASE).with_values(
        run={"seed": seed, "evaluation_pairs": 3}, reward={"mode": "sparse"}
    )
    Experiment(config, tmp_path / "alone").run()
    same_agents(whole.folder / f"seed-{seed}" / FOLDERS[1], tmp_path / "alone")
    state = checkpoint.read(tmp_path / "alone")["agent"]["compared"]["ppo"]
    alone = [host["accuracy"] for number in sorted(state) for host in state[number]][:3]
    hosts = whole.result.hosts[ARMS[1]][3 * (seed - 4) :][:3]
    assert [
        host.accuracy for host in hosts
    ] == alone  # the greedy agent, on the same held-out hosts


def test_the_arms_learn_one_after_the_other_with_the_same_seeds(whole: Whole) -> None:
    arms = ARMS[:2]
    wanted = [
        (arm, seed, number) for seed in (4, 5) for arm in arms for number in (1, 2)
    ]
    assert whole.turns == wanted
    for seed in (4, 5):
        for name in FOLDERS:
            file = whole.folder / f"seed-{seed}" / name / "config.toml"
            assert TrainingConfig.parse(read_toml(file)).run.seed == seed


def test_runs_that_other_machines_have_finished_play_as_they_are(
    whole: Whole, tmp_path: Path
) -> None:
    for seed in (4, 5):
        name = f"seed-{seed}"
        shutil.copytree(whole.folder / name, tmp_path / "o" / name)
    turns: list[str] = []
    again = compare(tmp_path / "o", learned=lambda arm, *_rest: turns.append(arm))
    assert values(again.run()) == values(whole.result)
    assert turns == []


def test_a_run_of_another_config_does_not_play_as_an_arm(
    whole: Whole, tmp_path: Path
) -> None:
    shutil.copytree(whole.folder / "seed-4", tmp_path / "o" / "seed-4")
    changed = {**BASE, "ppo": {**BASE["ppo"], "clip": 0.3}}
    text = r"arm 'ppo': .*0-ppo is a run with another ppo\.clip; give another --out"
    with pytest.raises(ConfigError, match=text):
        ComparisonRun(read_arms(ARMS, changed), 3, tmp_path / "o", train_seeds=2)


def test_a_comparison_that_was_killed_ends_as_if_it_was_not(
    whole: Whole, tmp_path: Path
) -> None:
    """One of its runs had no checkpoint yet."""
    shutil.copytree(whole.killed, tmp_path / "copy")
    for file in (tmp_path / "copy" / "seed-4" / FOLDERS[0]).glob("checkpoint*.pt"):
        file.unlink()
    assert values(ComparisonRun.resume(tmp_path / "copy").run()) == values(whole.result)
    same_agents(
        tmp_path / "copy" / "seed-4" / FOLDERS[0], whole.folder / "seed-4" / FOLDERS[0]
    )


def test_a_finished_comparison_is_reported_again_without_playing(
    whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: Collector) -> Any:
        raise AssertionError("nothing is left to play")

    monkeypatch.setattr(Collector, "play", never)
    again = ComparisonRun.resume(whole.folder, reference="ppo").run()
    assert values(again) == values(whole.result)
    assert set(again.metrics[0].comparisons) == {ARMS[1], "none"}


def test_what_cannot_be_compared_is_refused_before_anything_is_written(
    whole: Whole, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match="training seeds are for arms that learn, and no arm does"
    ):
        compare(tmp_path / "o", "none", "random")
    with pytest.raises(ConfigError, match=r"arm 'bad': ppo.gamma is 0.9"):
        compare(tmp_path / "o", "none", "bad:controller=ppo,ppo.gamma=0.9")
    with pytest.raises(ConfigError, match="the reference must be one of the arms"):
        compare(tmp_path / "o", reference="nope")
    assert not (tmp_path / "o").exists()
    with pytest.raises(ConfigError, match="is not empty"):
        compare(whole.folder)
