"""A run whose agent learns: what it tells, that its proof is made on hosts it never saw, that nothing disturbs it."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
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
from esper.run.agents import VALIDATION, PPORun
from esper.run.experiment import Experiment
from esper.run.rollout import play_round
from esper.run.telemetry import RunSummary
from esper.show.read import open_run
from esper.telemetry.event import (
    ArmPlayed,
    EpochCompleted,
    Event,
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
    same_results,
    tiny,
)
from tests.selection import slow_except

BASELINES = ["none", "random", "heuristic", "plans", "schedule"]
Learned = tuple[RunSummary, Recorder]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """A whole run, read by many tests; beside it, its folder as it was when the first arm had played."""
    runs = tmp_path_factory.mktemp("runs")
    copies = Does(
        lambda event: isinstance(event, ArmPlayed),
        lambda: shutil.copytree(runs / "r", runs / "first arm"),
    )
    return play(learning(evaluation_pairs=2), runs / "r", copies)


def test_events_come_in_the_order_in_which_things_happen(learned: Learned) -> None:
    """Rounds end with what was learned from them; the comparison follows the last one and ends the run."""
    names = [type(event).__name__ for event in learned[1].events]
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
    updates: list[PolicyUpdated] = of_kind(learned[1], PolicyUpdated)
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
    rounds: list[RoundCompleted] = of_kind(learned[1], RoundCompleted)
    assert [(event.test_accuracy, event.alone_test_accuracy) for event in rounds] == [
        (None, None)
    ] * 3
    rows = metrics(learned[0].folder)
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
    summary, recorder = learned
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
    assert [c.pair.name_b for c in summary.comparisons] == BASELINES[:4]
    assert {event.controller for event in of_kind(recorder, ArmPlayed)} == {
        "ppo",
        *BASELINES[:4],
    }


@pytest.mark.trap(28)
def test_arms_meet_the_same_hosts_and_none_of_them_was_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    born = births(monkeypatch)
    marks: list[int] = []
    arms = Recorder()
    arms.handle = lambda event: (
        marks.append(len(born)) if isinstance(event, ArmPlayed) else None
    )  # type: ignore[method-assign]
    play(learning(evaluation_pairs=4), tmp_path / "r", arms)
    first = marks[0] - 2  # each arm's round starts two hosts
    trained, compared = set(born[:first]), born[first:]
    assert not trained & set(compared)
    hosts = [(7 + HELD_OUT, env, episode) for episode in range(2) for env in range(2)]
    assert sorted(compared) == sorted(hosts * 6)
    assert {seed for seed, _, _ in trained} == {7, 7 + VALIDATION}


def test_hosts_that_agents_learn_from_are_validated_on_and_compared_on_have_seeds_that_are_far_apart() -> (
    None
):
    """However many run seeds a user counts through."""
    starts = sorted((0, VALIDATION, HELD_OUT))
    assert (
        min(later - earlier for earlier, later in itertools.pairwise(starts)) >= 2**28
    )


def test_the_arm_that_does_nothing_is_the_host_left_alone(tmp_path: Path) -> None:
    config = learning(evaluation_pairs=2)
    maker = EnvMaker.of(config)
    env = maker.make()
    env.prepare()
    reported: list[Event] = []
    arms = {arm.controller: arm for arm in PPORun(maker, env).evaluate(reported.append)}
    env.close()
    env = make_env(config)
    play_round(
        env, NoGrowth(env.action_spec, env.layout, env.num_envs), seed=7 + HELD_OUT
    )
    np.testing.assert_array_equal(arms["none"].accuracy, env.test_accuracy())
    env.close()
    assert arms["none"].fossils.tolist() == [0, 0]
    assert len(reported) == 6


def test_an_agent_is_compared_in_its_run_as_it_is_afterwards(learned: Learned) -> None:
    """`esper compare` of the checkpoint under the same seed repeats the figures that the run ended with."""
    summary, _ = learned
    name = f"checkpoint:{summary.folder}"
    arms = compare_controllers(
        learning(controller="none"), [name, "random", "none"], 2, lambda _event: None
    )
    pairs = {c.pair.name_b: c.pair for c in summary.comparisons}
    assert [arm.accuracy.mean() for arm in arms] == [
        pairs["none"].mean_a,
        pairs["random"].mean_b,
        pairs["none"].mean_b,
    ]


def test_the_comparison_teaches_the_agent_nothing(learned: Learned) -> None:
    folder = learned[0].folder
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
    """With other test images, all is the same until the comparison; then it is not."""

    def spoiled(name: str, options: DataOptions) -> Task:
        task = load_task(name, options)
        return dataclasses.replace(
            task, test=Split(task.test.x, (task.test.y + 1) % 10)
        )

    monkeypatch.setattr("esper.env.make.load_task", spoiled)
    summary, recorder = play(learning(evaluation_pairs=2), tmp_path / "r")
    ours, theirs = recorder.stable(), learned[1].stable()
    first = [event["event"] for event in theirs].index("ArmPlayed")
    assert ours[:first] == theirs[:first]
    assert ours[first:] != theirs[first:]
    compared = "/agent/compared/"  # the comparison itself
    assert {
        k: v
        for k, v in learned_state(summary.folder).items()
        if not k.startswith(compared)
    } == {
        k: v
        for k, v in learned_state(learned[0].folder).items()
        if not k.startswith(compared)
    }
    best = "best_host.safetensors"
    assert (summary.folder / best).read_bytes() == (
        learned[0].folder / best
    ).read_bytes()


@pytest.mark.finding("C1")
@pytest.mark.parametrize("lanes", slow_except([3], [1, 3]))
def test_same_seed_same_agent_whatever_the_workers(
    lanes: int, learned: Learned, tmp_path: Path
) -> None:
    summary, again = play(learning(evaluation_pairs=2, lanes=lanes), tmp_path / "r")
    assert again.stable() == learned[1].stable()
    assert learned_state(summary.folder) == learned_state(learned[0].folder)
    same_results(summary, learned[0])


class Meddles(Recorder):
    """A sink that draws random numbers and fails in the end."""

    def handle(self, event: Event) -> None:
        torch.rand(3)
        np.random.rand(3)  # noqa: NPY002  the global generator
        if isinstance(event, RoundCompleted):
            raise RuntimeError("the dashboard is gone")


@pytest.mark.trap(10)
@pytest.mark.parametrize("name", slow_except(["meddling"], ["off", "meddling"]))
def test_telemetry_changes_no_learned_bit(
    name: str, learned: Learned, tmp_path: Path
) -> None:
    """Without callbacks, and with one that takes numbers from the process's generators and breaks."""
    sinks = [Meddles()] if name == "meddling" else []
    summary = Experiment(learning(evaluation_pairs=2), tmp_path / name, sinks).run()
    assert learned_state(summary.folder) == learned_state(learned[0].folder)
    assert repr(summary.comparisons) == repr(learned[0].comparisons)
    assert bool(summary.dropped_sinks) == (name == "meddling")


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
    summary, recorder = play(learning(), tmp_path / "r")
    assert [event.rollbacks for event in of_kind(recorder, RoundCompleted)] == [1, 0, 0]
    assert [row["rollbacks"] for row in metrics(summary.folder)] == ["1", "0", "0"]

    def quiet(watched: Recorder) -> list[EpochCompleted]:
        return [
            e for e in of_kind(watched, EpochCompleted) if (e.env, e.episode) == (0, 0)
        ]

    assert quiet(recorder) == quiet(learned[1])
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


def test_a_run_has_the_rounds_of_its_task_by_default(tmp_path: Path) -> None:
    def rounds(controller: str) -> int:
        config = tiny(controller, rounds=None)
        with Experiment(config, tmp_path / "r") as experiment:
            return int(experiment.config.run.rounds or 0)

    assert rounds("ppo") == rounds("random") == 4
