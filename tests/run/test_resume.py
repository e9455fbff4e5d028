"""A run that was stopped and resumed ends as if it had never stopped, however it was stopped."""

from __future__ import annotations

import functools
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.config import ConfigError, TrainingConfig, read_toml
from esper.data.tasks import build_host
from esper.files import checkpoint
from esper.run.experiment import Experiment
from esper.telemetry.event import (
    ArmPlayed,
    BaselineMeasured,
    EpochCompleted,
    Event,
    PolicyUpdated,
)
from esper.training.executor import HostError
from esper.training.step import train_epoch
from tests.run.interrupted_runs import interrupted
from tests.run.run_helpers import (
    Does,
    Recorder,
    Runs,
    flat,
    kinds,
    learning,
    metrics,
    play,
    round_ends,
    same_results,
    same_run,
    stable_log,
    stop,
    tiny,
    within_round,
)
from tests.selection import slow_except
from tests.telemetry.sample_events import read_events

CONFIGS = {
    "random": lambda: tiny(rounds=3, seed=7),
    "ppo": learning,
    "practised": lambda: learning(ppo={"practice_steps": 256}),
    "planted": lambda: learning("planted", n_envs=4, rounds=4, evaluation_pairs=2),
    "two rounds an update": lambda: learning(rounds=4, ppo={"episodes_per_update": 4}),
    "checkpoint every 2": lambda: learning(rounds=4, checkpoint_every=2),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("whole"), CONFIGS)


@pytest.mark.trap(30)
@pytest.mark.parametrize(
    ("name", "number"),
    slow_except(
        [("random", 1), ("two rounds an update", 3)],
        [
            ("random", 1),
            ("random", 3),
            ("practised", 1),
            ("ppo", 3),
            ("two rounds an update", 2),
            ("two rounds an update", 3),
            ("checkpoint every 2", 2),
        ],
    ),
)
def test_a_run_stopped_within_a_round_ends_the_same(
    name: str, number: int, whole: Runs, tmp_path: Path
) -> None:
    """The stop may come before the first round is done, and between two rounds of one update."""
    summary = interrupted(
        CONFIGS[name](), tmp_path / "r", Does(within_round(number), stop)
    )
    assert (summary is None) == (number == 1)
    assert checkpoint.read(tmp_path / "r")["round"] == number - 1
    again = Experiment.resume(tmp_path / "r").run()
    folder, uncut = whole(name)
    same_run(tmp_path / "r", folder)
    same_results(again, uncut)


@pytest.mark.trap(30)
def test_a_run_stopped_between_rounds_of_simulated_hosts_resumes(
    whole: Runs, tmp_path: Path
) -> None:
    """Ctrl-C comes while round 2 is recorded, and acts once the round is complete."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sink = Does(round_ends(2), lambda: signal.raise_signal(signal.SIGINT))
        interrupted(CONFIGS["planted"](), tmp_path / "r", sink)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(metrics(tmp_path / "r")) == 2
    again = Experiment.resume(tmp_path / "r").run()
    folder, uncut = whole("planted")
    same_run(tmp_path / "r", folder)
    same_results(again, uncut)


@pytest.mark.trap(30)
def test_a_run_stopped_in_the_comparison_plays_it_again(
    whole: Runs, tmp_path: Path
) -> None:
    sink = Does(
        lambda event: isinstance(event, ArmPlayed) and event.controller == "heuristic",
        stop,
    )
    summary = interrupted(CONFIGS["planted"](), tmp_path / "r", sink)
    assert summary is not None
    assert (summary.comparisons, summary.rounds) == ((), 4)
    with pytest.raises(ValueError, match="nothing was compared"):
        _ = summary.comparison
    again = Experiment.resume(tmp_path / "r").run()
    folder, uncut = whole("planted")
    same_run(tmp_path / "r", folder)
    same_results(again, uncut)


@pytest.mark.finding("M12")
@pytest.mark.parametrize("name", slow_except(["random"], ["random", "ppo"]))
def test_an_error_in_a_worker_leaves_a_checkpoint(
    name: str, whole: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(training: Any, cancelled: Callable[[], bool]) -> None:
        if training.index == 1 and training.episode == 1 and training.epoch == 2:
            raise ArithmeticError("no more")
        train_epoch(training, cancelled)

    with monkeypatch.context() as patch:
        patch.setattr("esper.training.execution.workers.train_epoch", breaks)
        with pytest.raises(
            HostError, match=r"env 1, epoch 2, batch \d+: ArithmeticError: no more"
        ):
            Experiment(CONFIGS[name](), tmp_path / "r").run()
    assert "RunCompleted" not in kinds(tmp_path / "r")
    assert checkpoint.read(tmp_path / "r")["round"] == 1
    Experiment.resume(tmp_path / "r").run()
    same_run(tmp_path / "r", whole(name)[0])


@pytest.mark.trap(30)
def test_an_error_while_learning_leaves_the_agent_of_the_round_before(
    whole: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update is half done when it breaks; nothing of it is kept."""
    from esper.agents.ppo import agent, update

    def breaks(parameters: Any, *rest: Any) -> Any:
        update.update_policy(parameters, *rest)
        raise ArithmeticError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(agent, "update_policy", breaks)
        with pytest.raises(ArithmeticError):
            Experiment(learning(), tmp_path / "r").run()
    Experiment.resume(tmp_path / "r").run()
    same_run(tmp_path / "r", whole("ppo")[0])


@pytest.mark.trap(30)
@pytest.mark.parametrize(
    "name", slow_except(["random"], ["checkpoint every 2", "random"])
)
def test_a_killed_run_resumes_from_the_last_checkpoint(
    name: str, whole: Runs, tmp_path: Path
) -> None:
    """The folder as a killed process leaves it: logs ahead of the checkpoint, their last lines torn."""
    killed = tmp_path / "killed"
    last = 4 if name == "checkpoint every 2" else 3
    sink = Does(within_round(last), lambda: shutil.copytree(tmp_path / "r", killed))
    Experiment(CONFIGS[name](), tmp_path / "r", [sink]).run()
    for log in ("events.jsonl", "metrics.csv"):
        with (killed / log).open("ab") as file:
            file.write(b'{"event": "Epoch')
    assert checkpoint.read(killed)["round"] == 2
    assert len(metrics(killed)) == last  # the torn row counts as one
    Experiment.resume(killed).run()
    same_run(killed, whole(name)[0])


def test_events_are_cut_back_to_the_checkpoint_and_say_that_the_run_was_resumed(
    tmp_path: Path,
) -> None:
    interrupted(learning(), tmp_path / "r", Does(within_round(3), stop))
    before = stable_log(tmp_path / "r")
    sink = Recorder()
    Experiment.resume(tmp_path / "r", [sink]).run()
    names = kinds(tmp_path / "r")
    place = names.index("RunResumed")
    assert names[place - 1] == "PolicyUpdated"
    assert stable_log(tmp_path / "r")[:place] == before[:place]
    resumed = list(read_events(tmp_path / "r" / "events.jsonl"))[place]
    assert (
        resumed["round"],
        resumed["rounds"],
        resumed["n_envs"],
        resumed["episode_length"],
    ) == (2, 3, 2, 4)
    assert type(sink.events[0]).__name__ == "RunResumed"
    assert not any(isinstance(event, BaselineMeasured) for event in sink.events)
    assert (
        names.count("BaselineMeasured")
        == names.count("RunStarted")
        == names.count("RunCompleted")
        == 1
    )


@pytest.mark.slow
def test_a_run_may_be_stopped_and_resumed_again_and_again(
    whole: Runs, tmp_path: Path
) -> None:
    interrupted(learning(), tmp_path / "r", Does(within_round(2), stop))
    anything: list[Callable[[Event], bool]] = [
        lambda _event: True,
        within_round(2),
        within_round(3),
    ]
    for when in anything:
        assert Experiment.resume(tmp_path / "r", [Does(when, stop)]).run().interrupted
    Experiment.resume(tmp_path / "r").run()
    same_run(tmp_path / "r", whole("ppo")[0])


@pytest.mark.finding("M3")
def test_an_update_learns_from_the_episodes_that_the_config_says(whole: Runs) -> None:
    folder, _ = whole("two rounds an update")
    updates = [
        fields
        for fields in read_events(folder / "events.jsonl")
        if fields["event"] == "PolicyUpdated"
    ]
    assert [(fields["round"], fields["env_steps"]) for fields in updates] == [
        (2, 16),
        (4, 32),
    ]
    names = [
        name
        for name in kinds(folder)
        if name in (PolicyUpdated.__name__, "RoundCompleted")
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
        Does(lambda event: isinstance(event, BaselineMeasured), stop),
    )
    with pytest.raises(ConfigError, match=r"no checkpoint at .*checkpoint\.pt"):
        Experiment.resume(tmp_path / "r")


def test_a_resumed_run_measures_no_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tiny(rounds=2), tmp_path / "r", Does(within_round(2), stop))

    def never(*_arguments: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr("esper.env.vector_env.measure_baseline", never)
    assert Experiment.resume(tmp_path / "r").run().rounds == 2


@pytest.mark.trap(30)
def test_a_resumed_run_follows_the_schedule_it_was_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was edited since, and the working directory has changed."""
    monkeypatch.chdir(tmp_path)
    text = (
        '[[action]]\nepoch = 0\nop = "GERMINATE"\nslot = "r0c0"\nblueprint = "norm"\n'
    )
    Path("mine.toml").write_text(text)
    config = tiny("schedule:mine.toml", rounds=2)
    play(config, tmp_path / "whole")
    interrupted(config, tmp_path / "r", Does(within_round(2), stop))
    Path("mine.toml").write_text(text.replace("r0c0", "r1c0"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    Experiment.resume(tmp_path / "r").run()
    same_run(tmp_path / "r", tmp_path / "whole")
    assert {
        event.get("slot")
        for event in stable_log(tmp_path / "r")
        if event["event"] == "ActionTaken"
    } == {"r0c0"}


@pytest.mark.trap(30)
def test_a_resumed_run_plays_the_policy_it_was_begun_with(
    whole: Runs, tmp_path: Path
) -> None:
    shutil.copytree(whole("ppo")[0], tmp_path / "agent")
    config = tiny(f"checkpoint:{tmp_path / 'agent'}", rounds=2)
    play(config, tmp_path / "whole")
    interrupted(config, tmp_path / "r", Does(within_round(2), stop))
    shutil.rmtree(tmp_path / "agent")
    Experiment.resume(tmp_path / "r").run()
    same_run(tmp_path / "r", tmp_path / "whole")


@pytest.mark.trap(30)
@pytest.mark.slow
def test_a_checkpoint_of_another_run_lends_it_no_policy(
    whole: Runs, tmp_path: Path
) -> None:
    """Both runs play learned policies; a refused checkpoint is not used as the controller's policy."""
    play(learning(rounds=1, seed=8), tmp_path / "other agent")
    configs = [
        tiny(f"checkpoint:{place}", rounds=2)
        for place in (whole("ppo")[0], tmp_path / "other agent")
    ]
    play(configs[0], tmp_path / "whole")
    for name, config in zip("rs", configs, strict=True):
        interrupted(config, tmp_path / name, Does(within_round(2), stop))
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
    interrupted(tiny(rounds=2), tmp_path / "r", Does(within_round(2), stop))
    newest, previous = (
        tmp_path / "r" / name for name in ("checkpoint.pt", "checkpoint.previous.pt")
    )
    sound = previous.read_bytes()
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(KeyboardInterrupt):
        Experiment.resume(
            tmp_path / "r",
            [
                Does(
                    lambda e: isinstance(e, EpochCompleted),
                    functools.partial(signal.raise_signal, signal.SIGTERM),
                )
            ],
        ).run()
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

    play(tiny(rounds=2), tmp_path / "r", Does(within_round(2), resume))
    assert len(refused) == 1


@pytest.mark.slow
def test_a_run_on_auto_records_its_device_and_is_resumed_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(KeyboardInterrupt):
        play(tiny(device="auto"), tmp_path / "r", Does(within_round(1), stop))
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
    config = tiny(rounds=2).with_values(task={"start": str(weights)})
    interrupted(config, tmp_path / "run", Does(within_round(2), stop))
    torch.save(build_host("digits").state_dict(), weights)
    with pytest.raises(ConfigError, match="whose weights have changed"):
        Experiment.resume(tmp_path / "run")
