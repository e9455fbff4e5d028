"""A run that was stopped and resumed ends as if it had never stopped, however it was stopped."""

from __future__ import annotations

import logging
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.agents.ppo import agent, update
from esper.config import ConfigError, TrainingConfig, read_toml
from esper.data.tasks import build_host
from esper.files import checkpoint
from esper.run.experiment import Experiment
from esper.telemetry import event as events
from esper.telemetry.event import EpochCompleted, Event
from esper.training.executor import HostError
from esper.training.step import train_epoch
from tests.run.run_helpers import (
    Does,
    Recorder,
    Runs,
    flat,
    growing,
    interrupted,
    kinds,
    learning,
    metrics,
    of_kind,
    play,
    round_ends,
    same_results,
    same_run,
    stable_log,
    stop,
    stopped,
    tiny,
    within_round,
)
from tests.selection import slow_except
from tests.telemetry.sample_events import read_events

CONFIGS = {
    "random": lambda: tiny(rounds=2, seed=7).with_values(env={"episode_length": 3}),
    "schedule": lambda: growing(tiny("schedule", rounds=2)),
    "trained": lambda: growing(learning(rounds=2)),
    "simulated": lambda: tiny(task="planted", rounds=3, seed=7, checkpoint_every=2),
    "ppo": lambda: learning("planted"),
    "two rounds an update": lambda: learning(
        "planted", rounds=4, ppo={"episodes_per_update": 4}
    ),
    "compared": lambda: learning("planted", rounds=1, evaluation_pairs=2),
}
"""Simulated hosts of four epochs: a step each, and four more of the hosts left alone where nothing is learned."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("whole"), CONFIGS)


def at(episode: int, epoch: int) -> Callable[[Event], bool]:
    return lambda e: (
        isinstance(e, EpochCompleted)
        and (e.env, e.episode, e.epoch) == (0, episode, epoch)
    )


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def rollouts(folder: Path) -> Any:
    """The rollouts that the checkpoint has in the middle of a round."""
    return checkpoint.read(folder)["collector"]["rollouts"]


@pytest.mark.trap(30)
@pytest.mark.parametrize(
    ("name", "number"),
    slow_except(
        [("two rounds an update", 3)], [("ppo", 1), ("two rounds an update", 3)]
    ),
)
def test_a_run_stopped_within_a_step_plays_the_round_again(
    name: str, number: int, whole: Runs, tmp_path: Path
) -> None:
    """The stop may come before the first round is done, and between two rounds of one update."""
    summary = stopped(CONFIGS[name](), tmp_path / "r", 4 * number - 2)
    assert (summary is None) == (number == 1)
    assert checkpoint.read(tmp_path / "r")["round"] == number - 1
    assert rollouts(tmp_path / "r") == []
    whole.resumed(name, tmp_path / "r")


@pytest.mark.trap(30)
@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_a_run_of_trained_hosts_stopped_within_a_step_plays_the_round_again(
    number: int, whole: Runs, tmp_path: Path
) -> None:
    interrupted(CONFIGS["trained"](), tmp_path / "r", Does(within_round(number), stop))
    whole.resumed("trained", tmp_path / "r")


@pytest.mark.trap(30)
@pytest.mark.parametrize(
    ("name", "number"),
    slow_except(
        [("random", signal.SIGTERM)],
        [
            ("random", signal.SIGTERM),
            ("trained", signal.SIGINT),
            ("schedule", signal.SIGTERM),
        ],
    ),
)
def test_a_signal_stops_at_the_end_of_the_step_and_nothing_of_it_is_lost(
    name: str, number: int, whole: Runs, tmp_path: Path
) -> None:
    """The signal comes when the first env's epoch is reported; the second one's is reported before the run stops.
    Reported epochs are never played again."""
    where = at(1, 3) if number == signal.SIGINT else at(0, 2)
    summary = interrupted(
        CONFIGS[name](),
        tmp_path / "r",
        Does(where, lambda: signal.raise_signal(number)),
    )
    assert (summary is None) == (
        number == signal.SIGTERM
    )  # the first round has no results yet
    reported = [e for e in stable_log(tmp_path / "r") if e["event"] != "RunCompleted"]
    last = [e for e in reported if e["event"] == "EpochCompleted"][-1]
    assert (last["env"], last["epoch"]) == (1, 3 if number == signal.SIGINT else 2)
    assert len(rollouts(tmp_path / "r")) == 1
    whole.resumed(name, tmp_path / "r")
    assert kinds(tmp_path / "r").index("RunResumed") == len(reported)
    assert stable_log(tmp_path / "r")[: len(reported)] == reported


@pytest.mark.trap(30)
@pytest.mark.slow
def test_a_run_stops_and_resumes_at_every_step(whole: Runs, tmp_path: Path) -> None:
    """Every step is stopped once, and a state that was loaded is saved with the same bits."""
    interrupted(CONFIGS["trained"](), tmp_path / "r", Does(at(0, 1), ctrl_c))
    for episode, epoch in [(e, t) for e in (0, 1) for t in range(1, 7)][1:]:
        sink = Does(at(episode, epoch), ctrl_c)
        try:
            Experiment.resume(tmp_path / "r", [sink]).run()
        except KeyboardInterrupt:
            assert episode == 0
        assert sink.did
    whole.resumed("trained", tmp_path / "r")
    assert kinds(tmp_path / "r").count("RunResumed") == 12


def test_a_second_signal_stops_at_once_and_the_round_is_played_again(
    whole: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def twice() -> None:
        ctrl_c()
        assert (
            "stopping at the end of this step; a second Ctrl-C stops at once"
            in caplog.text
        )
        ctrl_c()

    with caplog.at_level(logging.WARNING):
        stopped(CONFIGS["ppo"](), tmp_path / "r", 7, twice)
    assert rollouts(tmp_path / "r") == []
    whole.resumed("ppo", tmp_path / "r")


@pytest.mark.trap(30)
@pytest.mark.parametrize(
    ("step", "running"), [(11, 1), (14, 2)], ids=["grown", "left alone"]
)
def test_a_run_stopped_at_the_end_of_a_step_goes_on_there(
    step: int, running: int, whole: Runs, tmp_path: Path
) -> None:
    """It may be one of the hosts left alone."""
    summary = stopped(CONFIGS["simulated"](), tmp_path / "r", step, ctrl_c)
    assert summary is not None
    assert (summary.interrupted, summary.rounds, summary.comparison.pairs) == (
        True,
        1,
        2,
    )
    assert len(rollouts(tmp_path / "r")) == running
    whole.resumed("simulated", tmp_path / "r")


@pytest.mark.trap(30)
def test_a_run_stopped_between_a_round_and_its_update_resumes_there(
    whole: Runs, tmp_path: Path
) -> None:
    """Ctrl-C comes while round 2 is recorded, and acts once the round is complete."""
    interrupted(CONFIGS["ppo"](), tmp_path / "r", Does(round_ends(2), ctrl_c))
    assert len(metrics(tmp_path / "r")) == 2
    assert kinds(tmp_path / "r")[-2:] == ["RoundCompleted", "PolicyUpdated"]
    whole.resumed("ppo", tmp_path / "r")


@pytest.mark.trap(30)
def test_finished_parts_of_the_comparison_are_not_played_again(
    whole: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.run.trainer.MEASURED_SECONDS", 0.0)
    arms = [e for e in stable_log(whole("compared")[0]) if e["event"] == "ArmPlayed"]
    third = (arms[2]["controller"], arms[2]["round"])
    sink = Does(
        lambda e: isinstance(e, events.ArmPlayed) and (e.controller, e.round) == third,
        ctrl_c,
    )
    summary = interrupted(CONFIGS["compared"](), tmp_path / "r", sink)
    assert summary is not None
    assert (summary.comparisons, summary.rounds) == ((), 1)
    with pytest.raises(ValueError, match="nothing was compared"):
        _ = summary.comparison
    played = checkpoint.read(tmp_path / "r")["agent"]["compared"]
    assert sum(len(rounds) for rounds in played.values()) == 2
    again = Recorder()
    same_results(Experiment.resume(tmp_path / "r", [again]).run(), whole("compared")[1])
    assert len(of_kind(again, events.ArmPlayed)) == len(arms) - 2
    same_run(tmp_path / "r", whole("compared")[0])


@pytest.mark.finding("M12")
@pytest.mark.slow
def test_an_error_in_a_worker_leaves_a_checkpoint(
    whole: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run resumes from there, and does not measure its baseline again."""

    def breaks(training: Any, cancelled: Callable[[], bool]) -> None:
        if training.index == 1 and training.episode == 1 and training.epoch == 1:
            raise ArithmeticError("no more")
        train_epoch(training, cancelled)

    with monkeypatch.context() as patch:
        patch.setattr("esper.training.execution.workers.train_epoch", breaks)
        with pytest.raises(
            HostError, match=r"env 1, epoch 1, batch \d+: ArithmeticError: no more"
        ):
            Experiment(CONFIGS["random"](), tmp_path / "r").run()
    assert "RunCompleted" not in kinds(tmp_path / "r")
    assert checkpoint.read(tmp_path / "r")["round"] == 1
    whole("random")  # measures its own baseline, unlike the resumed run
    monkeypatch.setattr("esper.env.vector_env.measure_baseline", None)
    whole.resumed("random", tmp_path / "r")


@pytest.mark.trap(30)
def test_an_error_while_learning_leaves_the_agent_of_the_round_before(
    whole: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update is half done when it breaks; nothing of it is kept."""

    def breaks(parameters: Any, *rest: Any) -> Any:
        update.update_policy(parameters, *rest)
        raise ArithmeticError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(agent, "update_policy", breaks)
        with pytest.raises(ArithmeticError):
            Experiment(CONFIGS["ppo"](), tmp_path / "r").run()
    whole.resumed("ppo", tmp_path / "r")


@pytest.mark.trap(30)
def test_a_killed_run_resumes_from_the_last_checkpoint(
    whole: Runs, tmp_path: Path
) -> None:
    """The folder as a killed process leaves it: logs ahead of the checkpoint, their last lines torn."""
    killed = tmp_path / "killed"
    stopped(
        CONFIGS["simulated"](),
        tmp_path / "r",
        18,
        lambda: shutil.copytree(tmp_path / "r", killed),
    )
    for log in ("events.jsonl", "metrics.csv"):
        with (killed / log).open("ab") as file:
            file.write(b'{"event": "Epoch')
    assert checkpoint.read(killed)["round"] == 2
    assert len(metrics(killed)) == 3  # the torn row counts as one
    whole.resumed("simulated", killed)


def test_events_are_cut_back_to_the_checkpoint_and_say_that_the_run_was_resumed(
    tmp_path: Path,
) -> None:
    stopped(CONFIGS["ppo"](), tmp_path / "r", 10)
    before = stable_log(tmp_path / "r")
    sink = Recorder()
    Experiment.resume(tmp_path / "r", [sink]).run()
    names = kinds(tmp_path / "r")
    place = names.index("RunResumed")
    assert names[place - 1] == "PolicyUpdated"
    assert stable_log(tmp_path / "r")[:place] == before[:place]
    resumed = list(read_events(tmp_path / "r" / "events.jsonl"))[place]
    assert [
        resumed[name] for name in ("round", "rounds", "n_envs", "episode_length")
    ] == [2, 3, 2, 4]
    assert isinstance(sink.events[0], events.RunResumed)
    assert of_kind(sink, events.BaselineMeasured) == []
    assert names.count("RunStarted") == names.count("RunCompleted") == 1


@pytest.mark.finding("M3")
def test_an_update_learns_from_the_episodes_that_the_config_says(whole: Runs) -> None:
    folder, _ = whole("two rounds an update")
    updates = [
        e for e in read_events(folder / "events.jsonl") if e["event"] == "PolicyUpdated"
    ]
    assert [(fields["round"], fields["env_steps"]) for fields in updates] == [
        (2, 16),
        (4, 32),
    ]
    names = [
        name for name in kinds(folder) if name in ("PolicyUpdated", "RoundCompleted")
    ]
    assert names == ["RoundCompleted", "RoundCompleted", "PolicyUpdated"] * 2


def test_a_finished_run_is_not_resumed(whole: Runs) -> None:
    folder, _ = whole("ppo")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(
        ConfigError, match="is finished: all 3 rounds were played and compared"
    ):
        Experiment.resume(folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_run_that_never_measured_its_baseline_is_not_resumed(tmp_path: Path) -> None:
    interrupted(
        tiny(),
        tmp_path / "r",
        Does(lambda e: isinstance(e, events.BaselineMeasured), stop),
    )
    with pytest.raises(ConfigError, match=r"no checkpoint at .*checkpoint\.pt"):
        Experiment.resume(tmp_path / "r")


@pytest.mark.trap(30)
def test_a_resumed_run_follows_the_schedule_it_was_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was edited since, and the working directory has changed."""
    monkeypatch.chdir(tmp_path)
    text = (
        '[[action]]\nepoch = 0\nop = "GERMINATE"\nslot = "r0c0"\nblueprint = "moss"\n'
    )
    Path("mine.toml").write_text(text)
    config = tiny("schedule:mine.toml", "planted", rounds=2)
    play(config, tmp_path / "whole")
    stopped(config, tmp_path / "r", 10)
    Path("mine.toml").write_text(text.replace("r0c0", "r9c9"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Experiment.resume(tmp_path / "r").run()
    same_run(tmp_path / "r", tmp_path / "whole")


@pytest.mark.trap(30)
def test_a_resumed_run_plays_the_policy_it_was_begun_with(
    whole: Runs, tmp_path: Path
) -> None:
    """It needs neither the run that the policy is from, nor does a checkpoint of another run lend it a policy."""
    shutil.copytree(whole("ppo")[0], tmp_path / "r agent")
    play(learning("planted", rounds=1, seed=8), tmp_path / "s agent")
    for name in "rs":
        config = tiny(f"checkpoint:{tmp_path / name} agent", "planted", rounds=2)
        if name == "r":
            play(config, tmp_path / "whole")
        stopped(config, tmp_path / name, 10)
        shutil.rmtree(tmp_path / f"{name} agent")
    policies = [flat(checkpoint.read(tmp_path / name)["policy"]) for name in "rs"]
    assert policies[0] != policies[1]
    shutil.copy(tmp_path / "s" / "checkpoint.pt", tmp_path / "r" / "checkpoint.pt")
    assert flat(checkpoint.read(tmp_path / "r")["policy"]) == policies[0]
    Experiment.resume(tmp_path / "r").run()
    same_run(tmp_path / "r", tmp_path / "whole")


@pytest.mark.trap(30)
def test_a_torn_checkpoint_does_not_take_the_place_of_the_sound_one_before_it(
    tmp_path: Path,
) -> None:
    """Otherwise there would be no intact checkpoint between two renames, and until the one after next is written."""
    config = tiny(task="planted", rounds=2)
    stopped(config, tmp_path / "r", 10)
    newest, previous = (
        tmp_path / "r" / name for name in ("checkpoint.pt", "checkpoint.previous.pt")
    )
    sound = previous.read_bytes()
    newest.write_bytes(newest.read_bytes()[:-1])
    stopped(None, tmp_path / "r", 1, lambda: signal.raise_signal(signal.SIGTERM))
    assert previous.read_bytes() == sound
    assert checkpoint.read_file(newest)["collector"]["rollouts"]
    Experiment.resume(tmp_path / "r").run()
    assert checkpoint.read_file(previous)["finished"] is False


def test_a_run_that_is_going_on_is_not_resumed_beside_itself(tmp_path: Path) -> None:
    refused: list[str] = []

    def resume() -> None:
        with pytest.raises(
            ConfigError, match="is being written by a run in progress"
        ) as found:
            Experiment.resume(tmp_path / "r")
        refused.append(str(found.value))

    stopped(tiny(task="planted"), tmp_path / "r", 2, resume)
    assert len(refused) == 1


@pytest.mark.trap(30)
@pytest.mark.parametrize(
    "target",
    ["run.rollout.Rollout.load_state_dict", "files.run_folder.RunFolder.cut_logs"],
)
def test_a_run_stopped_while_it_loads_its_checkpoint_writes_nothing(
    target: str, whole: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-loaded state is not the run's, and logs are longer than the checkpoint until they are cut."""
    stopped(CONFIGS["simulated"](), tmp_path / "r", 11, ctrl_c)
    with (tmp_path / "r" / "events.jsonl").open("ab") as log:
        log.write(b'{"event": "Epoch')
    before = {path: path.read_bytes() for path in (tmp_path / "r").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(f"esper.{target}", lambda *_: ctrl_c())
        with pytest.raises(KeyboardInterrupt):
            Experiment.resume(tmp_path / "r").run()
    assert {path: path.read_bytes() for path in (tmp_path / "r").iterdir()} == before
    whole.resumed("simulated", tmp_path / "r")


def test_a_signal_at_the_very_end_finds_the_run_finished(
    whole: Runs, tmp_path: Path
) -> None:
    """No work is left to resume, and no event is reported twice; the signal still takes effect."""
    last = Does(lambda e: isinstance(e, events.RunCompleted), ctrl_c)
    experiment = Experiment(CONFIGS["simulated"](), tmp_path / "r", [last])
    with pytest.raises(KeyboardInterrupt):
        experiment.run()
    assert experiment.finished
    assert checkpoint.read(tmp_path / "r")["finished"]
    same_run(tmp_path / "r", whole("simulated")[0])


@pytest.mark.slow
def test_a_run_on_auto_records_its_device_and_is_resumed_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    interrupted(tiny(device="auto"), tmp_path / "r", Does(within_round(1), stop))
    assert read_toml(tmp_path / "r" / "config.toml")["run"]["device"] == "cpu"
    monkeypatch.undo()  # on any machine
    assert Experiment.resume(tmp_path / "r").run().rounds == 1


@pytest.mark.slow
def test_a_run_that_starts_from_trained_hosts_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper.training.start.MAX_RESTARTS", 0)

    def config(folder: str) -> TrainingConfig:
        return tiny(rounds=2, seed=7).with_values(
            task={"start": "trained", "data": str(tmp_path / folder)}
        )

    interrupted(config("data"), tmp_path / "cut", Does(within_round(2), stop))
    shutil.rmtree(tmp_path / "data")  # they are trained again, to the same bits
    again = Experiment.resume(tmp_path / "cut").run()
    uncut, _ = play(config("data"), tmp_path / "whole")
    same_run(tmp_path / "cut", tmp_path / "whole")
    same_results(again, uncut)


def test_a_run_is_not_resumed_from_other_weights_than_it_started_from(
    tmp_path: Path,
) -> None:
    weights = tmp_path / "weights.pt"
    torch.save(build_host("digits").state_dict(), weights)
    config = tiny().with_values(task={"start": str(weights)})
    interrupted(config, tmp_path / "run", Does(within_round(1), stop))
    torch.save(build_host("digits").state_dict(), weights)
    with pytest.raises(ConfigError, match="whose weights have changed"):
        Experiment.resume(tmp_path / "run")
