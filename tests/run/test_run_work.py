"""The work of a run is planned completely before it begins, and used up exactly when it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper.compare.arms import read_arms
from esper.compare.comparison_run import ComparisonRun
from esper.compare.evaluate import evaluate_controller
from esper.config import TrainingConfig
from esper.run.experiment import Experiment
from esper.telemetry.workload import Workload
from tests.run.run_helpers import Does, learning, stop, tiny, within_round

PRACTICE = {"practice_steps": 128, "practice_envs": 4, "validate_every": 2}


class Watched:
    """A workload that keeps the phases in the order in which they were worked on."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.work = Workload()
        self.work.report = self.note

    def note(self, work: Workload) -> None:
        if work.current is not None and work.current not in self.order[-1:]:
            self.order.append(work.current)
        left = work.seconds_left()
        assert left is not None
        assert left > 0 or all(phase.left < 1e-6 for phase in work.phases.values())

    def check(self) -> None:
        """The planned work is done exactly."""
        phases = self.work.phases.values()
        assert {p.name: p.done for p in phases} == pytest.approx(
            {p.name: p.total for p in phases}
        )
        assert self.work.seconds_left() == pytest.approx(0.0, abs=1e-6)


def test_a_run_of_an_agent_counts_all_of_its_phases(tmp_path: Path) -> None:
    watched = Watched()
    Experiment(
        learning(ppo=PRACTICE, evaluation_pairs=1, rounds=2),
        tmp_path / "run",
        work=watched.work,
    ).run()
    names = ["baseline", "practice", "rounds", "validation", "comparison"]
    assert list(watched.work.phases) == names
    assert list(dict.fromkeys(watched.order)) == names
    watched.check()


def test_a_run_of_a_controller_that_does_not_learn_counts_the_hosts_left_alone(
    tmp_path: Path,
) -> None:
    watched = Watched()
    Experiment(tiny(rounds=2), tmp_path / "run", work=watched.work).run()
    assert watched.order == ["baseline", "rounds"]
    watched.check()


def test_hosts_that_stop_early_are_counted_in_full(tmp_path: Path) -> None:
    config = tiny("none").with_values(
        env={"stop_on": ["plateau"], "plateau_epochs": 1, "plateau_margin": 100.0}
    )
    watched = Watched()
    Experiment(config, tmp_path / "run", work=watched.work).run()
    watched.check()


def test_a_resumed_run_counts_what_is_left(tmp_path: Path) -> None:
    config = learning(ppo=PRACTICE, evaluation_pairs=2, rounds=2)
    Experiment(config, tmp_path / "run", [Does(within_round(2), stop)]).run()
    watched = Watched()
    Experiment.resume(tmp_path / "run", work=watched.work).run()
    assert list(dict.fromkeys(watched.order)) == ["rounds", "validation", "comparison"]
    watched.check()


def test_a_comparison_counts_controls_too(tmp_path: Path) -> None:
    base = {
        "task": {"samples_per_epoch": 128},
        "env": {"n_envs": 2, "episode_length": 4, "baseline_episodes": 1},
    }
    watched = Watched()
    ComparisonRun(
        read_arms(["random", "static", "none"], base),
        3,
        tmp_path / "c",
        work=watched.work,
    ).run()
    assert watched.order == ["baseline", "comparison"]
    watched.check()


def test_a_comparison_of_agents_counts_every_training_seed(tmp_path: Path) -> None:
    base = learning(
        ppo={"practice_steps": 0, "validate_every": 2}, rounds=2
    ).model_dump(mode="json", exclude_none=True)
    watched = Watched()
    arms = read_arms(
        ["ppo", "none"], {name: base[name] for name in ("run", "task", "env", "ppo")}
    )
    ComparisonRun(arms, 2, tmp_path / "c", train_seeds=2, work=watched.work).run()
    assert set(watched.order) == {"baseline", "rounds", "validation", "comparison"}
    watched.check()


def test_an_evaluation_counts_its_exploration(tmp_path: Path) -> None:
    changes = {
        "task": {"samples_per_epoch": 128},
        "env": {"n_envs": 2, "episode_length": 4, "baseline_episodes": 1},
        "run": {"evaluation_pairs": 2},
    }
    watched = Watched()
    settings = {"changes": changes, "explore": 1, "work": watched.work}
    evaluate_controller("pretrained", tmp_path / "o", "digits", **settings).run()
    assert watched.order == ["baseline", "exploration", "baseline", "comparison"]
    watched.check()


def test_simulated_hosts_have_no_baseline_to_measure(tmp_path: Path) -> None:
    config = TrainingConfig.parse(
        {
            "task": {"name": "planted"},
            "run": {"controller": "random", "rounds": 1},
            "env": {"n_envs": 2, "episode_length": 6},
        }
    )
    watched = Watched()
    Experiment(config, tmp_path / "run", work=watched.work).run()
    assert watched.order == ["rounds"]
    watched.check()
