"""A run whose hosts are spread over ranks is, to the last bit, the run of one process; a rank that fails ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from esper.config import ConfigError, TrainingConfig
from esper.env.make import EnvMaker
from esper.files import checkpoint
from esper.run.experiment import Experiment
from esper.show.charts import Table
from esper.show.read import open_run
from esper.show.sections import time
from esper.telemetry.event import (
    EpisodeCompleted,
    EpochCompleted,
    GovernorRollback,
    RanksWaited,
    StageChanged,
)
from esper.training.execution.ranks import RunRanks
from esper.training.executor import RankFailed, RankLost
from tests.run.rank_helpers import break_a_host, fail, hang, kill, ranks_of
from tests.run.run_helpers import Does, Runs, kinds, same_results, same_run, stop, tiny
from tests.selection import slow_except


def growing(controller: str = "schedule", **sections: dict[str, Any]) -> TrainingConfig:
    """Some hosts in which seeds are planted."""
    return TrainingConfig.parse(
        {
            "run": {
                "rounds": 2,
                "controller": controller,
                "seed": 7,
                "evaluation_pairs": 2,
                **sections.pop("run", {}),
            },
            "task": {"samples_per_epoch": 64, **sections.pop("task", {})},
            "env": {
                "n_envs": 4,
                "episode_length": 6,
                "baseline_episodes": 3,
                **sections.pop("env", {}),
            },
            "ppo": {"width": 16, "validate_every": 1},
        }
    )


MERGING = {
    "n_envs": 3,
    "merge": True,
    "slots": ["r0c0", "r2"],
    "one_incubating": False,
}
CONFIGS = {
    "small": lambda: growing(
        "random",
        run={"rounds": 1},
        env={"n_envs": 3, "episode_length": 3, "baseline_episodes": 2},
    ),
    "schedule": growing,
    "ppo": lambda: growing("ppo"),
    "wild": lambda: growing(
        "random", task={"learning_rate": 30.0}, env={"stop_on": ["divergence"]}
    ),
    # seeds that fade on another rank while nothing is planted
    "fading": lambda: growing(
        "random", run={"rounds": 1}, env={"n_envs": 2, "episode_length": 20}
    ),
    "merging": lambda: growing(
        "random", run={"rounds": 1}, env={**MERGING, "episode_length": 12}
    ),
    "editing": lambda: growing(
        "random", run={"rounds": 1}, env={**MERGING, "edits_per_epoch": 4}
    ),
    "automatic": lambda: growing("random", env={"auto_advance": ["G1", "G2", "G3"]}),
}

OTHERS = ("small", "fading", "merging", "editing")
FOUR_HOSTS = [name for name in CONFIGS if name not in OTHERS]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The runs in one process."""
    return Runs(tmp_path_factory.mktemp("alone"), CONFIGS)


@pytest.mark.parametrize(
    ("name", "size"),
    slow_except(
        [("small", 2)],
        [
            ("small", 2),
            ("fading", 2),
            ("merging", 2),
            ("editing", 2),
            *((name, size) for name in FOUR_HOSTS for size in (2, 4)),
        ],
    ),
)
def test_ranks_train_the_hosts_of_one_process(
    name: str, size: int, alone: Runs, tmp_path: Path
) -> None:
    folder, summary = alone(name)
    with ranks_of(size) as ranks:
        spread = Experiment(CONFIGS[name](), tmp_path / "r", ranks=ranks).run()
    same_run(folder, tmp_path / "r")
    same_results(summary, spread)
    run = open_run(tmp_path / "r")
    laps = run.of(RanksWaited)
    assert [lap.round for lap in laps] == list(range(1, summary.rounds + 1))
    assert all(0 <= waited <= lap.seconds for lap in laps for waited in lap.waited)
    table = time(run.view)[-1]
    assert isinstance(table, Table)
    assert len(table.rows) == len(laps[0].waited) == size
    if name == "merging":
        merges = [event.merges for event in run.of(EpisodeCompleted)]
        assert any(sum(of_host.values()) > 1 for of_host in merges)
        assert "shrink" in {event.cause for event in run.of(StageChanged)}
    if name == "wild":
        assert GovernorRollback.__name__ in kinds(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("small", 1, 2), ("small", 2, 3), ("merging", 1, 1), ("merging", 2, 3)],
)
def test_a_run_is_resumed_with_another_number_of_ranks(
    name: str, before: int, after: int, alone: Runs, tmp_path: Path
) -> None:
    stops = Does(
        lambda event: isinstance(event, EpochCompleted) and event.epoch == 2, stop
    )
    with ranks_of(before) as ranks, pytest.raises(KeyboardInterrupt):
        Experiment(CONFIGS[name](), tmp_path / "r", [stops], ranks=ranks).run()
    with ranks_of(after) as ranks:
        Experiment.resume(tmp_path / "r", ranks=ranks).run()
    same_run(alone(name)[0], tmp_path / "r")


FAULTS = {
    "killed": (kill, RankLost, "rank 1 is gone: its connection was closed$"),
    "raises": (fail, RankFailed, "rank 1: (?s:.*)ValueError: this is the fault"),
    "a host": (break_a_host, RankFailed, "rank 1: env 1, epoch 1, batch \\d: [^\n]*$"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_ends_the_run_and_is_named(
    fault: str, tmp_path: Path
) -> None:
    does, error, words = FAULTS[fault]
    with ranks_of(2, does, epoch=2) as ranks, pytest.raises(error, match=words):
        Experiment(tiny(), tmp_path / "r", ranks=ranks).run()
    assert (
        checkpoint.read(tmp_path / "r")["round"] == 0
    )  # all that was saved can be read


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with (
        ranks_of(2, hang, epoch=2, minutes=0.25) as ranks,
        pytest.raises(RankLost, match=r"rank 1 did not answer for 0\.25 minutes"),
    ):
        Experiment(tiny(), tmp_path / "r", ranks=ranks).run()


def test_simulated_hosts_are_not_spread() -> None:
    config = TrainingConfig.parse({"task": {"name": "planted"}})
    with pytest.raises(ConfigError, match="hosts of planted are in one process"):
        EnvMaker.of(config, ranks=RunRanks(0, 2))
