"""A run whose agent learns: what it tells, that its proof is made on hosts it never saw, that nothing disturbs it."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.agents.controller import NoGrowth
from esper.cli.run import closing_words
from esper.compare.comparison import compare_controllers
from esper.compare.evaluate import hosts_config
from esper.data.split import Split
from esper.data.task import DataOptions, Task
from esper.data.tasks import load_task
from esper.env.make import EnvMaker, make_env
from esper.files import checkpoint
from esper.files.policy import find_policy
from esper.run.agents import VALIDATION
from esper.run.experiment import Experiment
from esper.run.rollout import play_round
from esper.run.telemetry import RunSummary
from esper.show.read import open_run
from esper.telemetry.event import (
    ArmPlayed,
    EpochCompleted,
    PolicyUpdated,
    RoundCompleted,
    RunCompleted,
)
from esper.telemetry.span import PHASES
from esper.training.host_training import HostTraining
from esper.training.rng import HELD_OUT
from esper.training.step import train_epoch
from tests.core_helpers import DAMAGE
from tests.run.run_helpers import (
    Does,
    Recorder,
    births,
    flat,
    learned_state,
    learning,
    metrics,
    of_kind,
    play,
    tiny,
)

BASELINES = ["none", "random", "heuristic", "schedule", "untrained"]
COMPARED = "/agent/compared/"
"""Where a checkpoint has the hosts of the comparison."""


@dataclass
class Learned:
    """A whole run, read by many tests."""

    summary: RunSummary
    recorder: Recorder
    born: list[tuple[int, int, int]]
    """Run seed, env and episode of every host."""
    trained: int
    """Number of hosts before the comparison."""

    @property
    def prefix(self) -> list[dict[str, Any]]:
        """The events before the comparison."""
        found = self.recorder.stable()
        return found[: [event["event"] for event in found].index("ArmPlayed")]

    @property
    def state(self) -> dict[str, Any]:
        return agent_state(self.summary)


def agent_state(summary: RunSummary) -> dict[str, Any]:
    """All bits of a run but those of its comparison, and that it is finished."""
    return {
        k: v
        for k, v in learned_state(summary.folder).items()
        if not k.startswith(COMPARED)
    }


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """Beside its folder is a copy from when the first arm had played."""
    runs = tmp_path_factory.mktemp("runs")
    marks: list[int] = []

    def first_arm() -> None:
        shutil.copytree(runs / "r", runs / "first arm")
        marks.append(len(born) - 2)  # each arm's round starts two hosts

    copies = Does(lambda event: isinstance(event, ArmPlayed), first_arm)
    with pytest.MonkeyPatch.context() as patch:
        born = births(patch)
        summary, recorder = play(learning(evaluation_pairs=2), runs / "r", copies)
    return Learned(summary, recorder, born, marks[0])


def test_events_come_in_the_order_in_which_things_happen(learned: Learned) -> None:
    """Rounds end with what was learned from them; the comparison follows the last one and ends the run."""
    names = [type(event).__name__ for event in learned.recorder.events]
    assert names[:2] == ["RunStarted", "BaselineMeasured"]
    rare = [
        name
        for name in names
        if name in ("PolicyUpdated", "RoundCompleted", "ArmPlayed", "RunCompleted")
    ]
    assert rare == ["RoundCompleted", "PolicyUpdated"] * 3 + ["ArmPlayed"] * 6 + [
        "RunCompleted"
    ]
    assert (
        names.count("EpochCompleted") == 3 * 2 * 4
    )  # rounds, hosts, epochs: the comparison has no envs in the log
    assert names[-7:] == rare[-7:]


def test_updates_tell_what_the_agent_did(learned: Learned) -> None:
    updates: list[PolicyUpdated] = of_kind(learned.recorder, PolicyUpdated)
    assert [update.round for update in updates] == [1, 2, 3]
    assert [update.env_steps for update in updates] == [8, 16, 24]
    rates = [update.learning_rate for update in updates]
    assert rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    assert (
        updates[0].entropy_coefficient
        > updates[1].entropy_coefficient
        > updates[2].entropy_coefficient
    )
    assert all(
        0 <= value <= 1
        for update in updates
        for value in update.head_entropies.values()
    )


def test_rounds_that_are_learned_from_claim_nothing_about_test_images(
    learned: Learned,
) -> None:
    rounds: list[RoundCompleted] = of_kind(learned.recorder, RoundCompleted)
    assert [(event.test_accuracy, event.alone_test_accuracy) for event in rounds] == [
        (None, None)
    ] * 3
    rows = metrics(learned.summary.folder)
    assert [(row["test_accuracy"], row["alone_test_accuracy"]) for row in rows] == [
        ("", "")
    ] * 3
    assert [float(row["mean_return"]) for row in rows] == [
        event.mean_return for event in rounds
    ]
    for row in rows:
        phases = {
            name.removeprefix("phase/"): cell
            for name, cell in row.items()
            if name.startswith("phase/")
        }
        assert list(phases) == list(PHASES)
        assert phases.pop("stage") == ""  # the data is in memory
        assert all(float(seconds) > 0 for seconds in phases.values())
        assert sum(map(float, phases.values())) < float(row["seconds"])


def test_the_run_is_compared_with_every_baseline_in_a_fixed_order(
    learned: Learned,
) -> None:
    summary, recorder = learned.summary, learned.recorder
    assert [(c.pair.name_a, c.pair.name_b) for c in summary.comparisons] == [
        ("ppo", name) for name in BASELINES
    ]
    assert {c.pair.pairs for c in summary.comparisons} == {2}
    assert summary.comparison is summary.comparisons[0].pair
    (end,) = of_kind(recorder, RunCompleted)
    assert [reported.reference for reported in end.comparisons] == BASELINES
    assert [reported.p_value for reported in end.comparisons] == [
        c.adjusted_p for c in summary.comparisons
    ]
    assert {reported.accuracy for reported in end.comparisons} == {
        summary.comparison.mean_a
    }


def test_a_run_without_evaluation_pairs_finishes_without_a_comparison(
    tmp_path: Path,
) -> None:
    summary, recorder = play(
        learning("planted", n_envs=4, rounds=1, evaluation_pairs=0), tmp_path / "r"
    )
    assert (summary.comparisons, summary.interrupted) == ((), False)
    assert [event.comparisons for event in of_kind(recorder, RunCompleted)] == [()]
    assert "Nothing was compared: run.evaluation_pairs is 0." in closing_words(
        summary, "planted"
    )
    assert open_run(summary.folder).state_words() == "finished: 1 round played"
    assert (
        hosts_config(find_policy(str(summary.folder)), None, {}).run.evaluation_pairs
        == 16
    )


def test_a_task_without_a_schedule_is_compared_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "esper.run.agents.shipped_schedule_fits", lambda _task, _spec: False
    )
    summary, recorder = play(
        learning("planted", n_envs=4, rounds=1, evaluation_pairs=2), tmp_path / "r"
    )
    assert [c.pair.name_b for c in summary.comparisons] == [*BASELINES[:3], "untrained"]
    assert {event.controller for event in of_kind(recorder, ArmPlayed)} == {
        "ppo",
        *BASELINES[:3],
        "untrained",
    }


@pytest.mark.trap(28)
def test_arms_meet_the_same_hosts_and_none_of_them_was_trained_on(
    learned: Learned,
) -> None:
    trained, compared = (
        set(learned.born[: learned.trained]),
        learned.born[learned.trained :],
    )
    assert not trained & set(compared)
    assert sorted(compared) == sorted([(7 + HELD_OUT, env, 0) for env in range(2)] * 6)
    assert {seed for seed, _, _ in trained} == {7}


def test_hosts_that_agents_learn_from_are_validated_on_and_compared_on_have_seeds_that_are_far_apart() -> (
    None
):
    """However many run seeds a user counts through."""
    starts = sorted((0, VALIDATION, HELD_OUT))
    assert (
        min(later - earlier for earlier, later in itertools.pairwise(starts)) >= 2**28
    )


def test_the_arm_that_does_nothing_is_the_host_left_alone(learned: Learned) -> None:
    env = make_env(learning())
    play_round(
        env, NoGrowth(env.action_spec, env.layout, env.num_envs), seed=7 + HELD_OUT
    )
    (hosts,) = checkpoint.read(learned.summary.folder)["agent"]["compared"][
        "none"
    ].values()
    assert [host["accuracy"] for host in hosts] == env.test_accuracy().tolist()
    assert [host["fossils"] for host in hosts] == [0, 0]
    env.close()


def test_an_agent_is_compared_in_its_run_as_it_is_afterwards(learned: Learned) -> None:
    """`esper compare` of the checkpoint under the same seed repeats the figures that the run ended with."""
    name = f"checkpoint:{learned.summary.folder}"
    arms = compare_controllers(learning(controller="none"), [name, "none"], 2)
    pair = learned.summary.comparison
    assert [arm.accuracy.mean() for arm in arms] == [pair.mean_a, pair.mean_b]


def test_the_comparison_teaches_the_agent_nothing(learned: Learned) -> None:
    folder = learned.summary.folder
    before, after = (
        checkpoint.read(each) for each in (folder.parent / "first arm", folder)
    )
    assert (before["finished"], after["finished"]) == (False, True)
    played = after["agent"].pop("compared")
    assert sum(len(rounds) for rounds in played.values()) > sum(
        len(rounds) for rounds in before["agent"].pop("compared").values()
    )
    assert flat(before["collector"]) == flat(after["collector"])
    assert flat(before["agent"]) == flat(after["agent"])


@pytest.mark.trap(24)
def test_test_images_decide_nothing_while_the_agent_learns(
    learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other test images change the comparison and the figures of the best host, and nothing before them."""

    def spoiled(name: str, options: DataOptions) -> Task:
        task = load_task(name, options)
        return dataclasses.replace(
            task, test=Split(task.test.x, (task.test.y + 1) % 10)
        )

    monkeypatch.setattr("esper.env.make.load_task", spoiled)
    summary, recorder = play(learning(), tmp_path / "r")
    assert recorder.stable()[:-1] == learned.prefix
    assert agent_state(summary) == learned.state
    ours, theirs = summary.folder / "best_host", learned.summary.folder / "best_host"
    assert (
        ours.with_suffix(".safetensors").read_bytes()
        == theirs.with_suffix(".safetensors").read_bytes()
    )
    assert (
        ours.with_suffix(".json").read_bytes()
        != theirs.with_suffix(".json").read_bytes()
    )


@pytest.mark.finding("C1")
def test_same_seed_same_agent_whatever_the_workers(
    learned: Learned, tmp_path: Path
) -> None:
    summary, again = play(learning(lanes=3), tmp_path / "r")
    assert again.stable()[:-1] == learned.prefix
    assert agent_state(summary) == learned.state


@pytest.mark.finding("H1")
def test_a_rollback_is_counted_and_disturbs_no_other_host(
    learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(training: HostTraining, cancelled: Callable[[], bool]) -> None:
        train_epoch(training, cancelled)
        if (training.run_seed, training.index, training.episode, training.epoch) == (
            7,
            1,
            0,
            hurt,
        ):
            DAMAGE["NaN weight"](training)

    hurt = 2
    monkeypatch.setattr("esper.training.execution.workers.train_epoch", breaks)
    summary, recorder = play(learning(rounds=1), tmp_path / "r")
    assert [event.rollbacks for event in of_kind(recorder, RoundCompleted)] == [1]
    assert [row["rollbacks"] for row in metrics(summary.folder)] == ["1"]

    def quiet(watched: Recorder) -> list[EpochCompleted]:
        return [
            e for e in of_kind(watched, EpochCompleted) if (e.env, e.episode) == (0, 0)
        ]

    assert quiet(recorder) == quiet(learned.recorder)
    policy = checkpoint.read(summary.folder)["policy"]
    assert all(bool(tensor.isfinite().all()) for tensor in policy["network"].values())


@pytest.mark.slow
def test_what_is_learned_does_not_depend_on_the_threads_of_the_process(
    tmp_path: Path,
) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            folder = tmp_path / str(threads)
            Experiment(learning("planted", n_envs=16, ppo={"width": 128}), folder).run()
            assert torch.get_num_threads() == threads
            found.append(checkpoint.read(folder)["policy"]["network"])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize(("controller", "rounds"), [("ppo", 20), ("random", 4)])
def test_a_run_has_the_rounds_of_its_task_by_default(
    controller: str, rounds: int
) -> None:
    assert EnvMaker.of(tiny(controller, rounds=None)).config.run.rounds == rounds
