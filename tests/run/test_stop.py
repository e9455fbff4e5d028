"""A signal stops a run at the end of the current step, and the run resumes from that step."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from esper.files import checkpoint
from esper.run.experiment import Experiment
from esper.telemetry.event import (
    ArmPlayed,
    BaselineMeasured,
    EpochCompleted,
    Event,
    PracticeRound,
    RunCompleted,
)
from tests.run.run_helpers import (
    Does,
    Runs,
    kinds,
    learning,
    play,
    round_ends,
    same_results,
    same_run,
    stable_log,
    tiny,
)
from tests.selection import slow_except
from tests.telemetry.sample_events import read_events

GATES = {
    "min_training_epochs": 1,
    "min_gradient_health": 0.0,
    "trial_standard_errors": 1000.0,
}


def growing(config: Any) -> Any:
    """The config with seeds that reach late stages in few epochs."""
    return config.with_values(env={"episode_length": 6, "gates": GATES, "embargo": 1})


CONFIGS = {
    "ppo": lambda: growing(learning(rounds=2)),
    "two rounds an update": lambda: growing(
        learning(ppo={"episodes_per_update": 4}, rounds=2)
    ),
    "random": lambda: growing(tiny(rounds=2, seed=7)),
    "heuristic": lambda: growing(tiny("heuristic", rounds=2)),
    "schedule": lambda: growing(tiny("schedule", rounds=2)),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("whole"), CONFIGS)


@pytest.fixture(autouse=True)
def signals_interrupt() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, as in a program of the command line."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def at(episode: int, epoch: int, env: int = 0) -> Callable[[Event], bool]:
    return lambda e: (
        isinstance(e, EpochCompleted)
        and (e.episode, e.epoch, e.env) == (episode, epoch, env)
    )


def sends(number: int) -> Callable[[], None]:
    return lambda: signal.raise_signal(number)


def state_of(folder: Path) -> Any:
    return checkpoint.read(folder)["collector"]["rollouts"]


@pytest.mark.trap(30)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", slow_except(["ppo"], CONFIGS))
def test_a_signal_stops_at_the_end_of_the_step_and_nothing_of_it_is_lost(
    name: str, number: int, whole: Runs, tmp_path: Path
) -> None:
    """The signal comes when the first env's epoch is reported; the second one's is reported before the run stops.
    Reported epochs are never played again."""
    config = CONFIGS[name]()
    folder, uncut = whole(name)
    where = at(1, 3) if number == signal.SIGINT else at(0, 2)
    sink = Does(where, sends(number))
    try:
        Experiment(config, tmp_path / "r", [sink]).run()
    except KeyboardInterrupt:
        assert number == signal.SIGTERM  # the first round has no results yet
    assert sink.did
    reported = [e for e in stable_log(tmp_path / "r") if e["event"] != "RunCompleted"]
    last = [e for e in reported if e["event"] == "EpochCompleted"][-1]
    assert (last["env"], last["epoch"]) == (1, 3 if number == signal.SIGINT else 2)
    assert len(state_of(tmp_path / "r")) == 1
    summary = Experiment.resume(tmp_path / "r").run()
    assert kinds(tmp_path / "r").index("RunResumed") == len(reported)
    assert stable_log(tmp_path / "r")[: len(reported)] == reported
    same_run(tmp_path / "r", folder)
    same_results(summary, uncut)


@pytest.mark.trap(30)
@pytest.mark.slow
def test_a_run_stops_and_resumes_at_every_step(whole: Runs, tmp_path: Path) -> None:
    """Every step is stopped once, and a state that was loaded is saved with the same bits."""
    config = CONFIGS["ppo"]()
    folder, _ = whole("ppo")
    with pytest.raises(KeyboardInterrupt):
        Experiment(config, tmp_path / "r", [Does(at(0, 1), sends(signal.SIGINT))]).run()
    for episode, epoch in [
        (e, t) for e in (0, 1) for t in range(1, 7) if (e, t) > (0, 1)
    ]:
        sink = Does(at(episode, epoch), sends(signal.SIGINT))
        try:
            Experiment.resume(tmp_path / "r", [sink]).run()
        except KeyboardInterrupt:
            assert episode == 0
        assert sink.did
    Experiment.resume(tmp_path / "r").run()
    assert kinds(tmp_path / "r").count("RunResumed") == 12
    same_run(tmp_path / "r", folder)


@pytest.mark.trap(30)
def test_a_run_stopped_in_its_controls_resumes_there(
    whole: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller's hosts have played their round, and the best host is one of them."""
    config = CONFIGS["random"]()
    folder, uncut = whole("random")
    experiment = Experiment(config, tmp_path / "r")
    controls: Any = experiment.trainer.collector.envs[1]
    step, steps = controls.step, []

    def stopping(actions: Any) -> Any:
        steps.append(1)
        if len(steps) == 8:
            signal.raise_signal(signal.SIGINT)
        return step(actions)

    monkeypatch.setattr(controls, "step", stopping)
    assert experiment.run().interrupted
    assert len(state_of(tmp_path / "r")) == 2
    same_results(Experiment.resume(tmp_path / "r").run(), uncut)
    same_run(tmp_path / "r", folder)


@pytest.mark.slow
def test_a_second_signal_stops_at_once_and_the_round_is_played_again(
    whole: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = CONFIGS["ppo"]()
    folder, _ = whole("ppo")

    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        assert (
            "stopping at the end of this step; a second Ctrl-C stops at once"
            in caplog.text
        )
        signal.raise_signal(signal.SIGINT)

    with caplog.at_level(logging.WARNING):
        Experiment(config, tmp_path / "r", [Does(at(1, 3), twice)]).run()
    assert stable_log(tmp_path / "r")[-1]["epoch"] == 3
    assert state_of(tmp_path / "r") == []
    Experiment.resume(tmp_path / "r").run()
    same_run(tmp_path / "r", folder)


@pytest.mark.slow
def test_a_long_round_is_saved_by_the_clock(tmp_path: Path) -> None:
    """A run that is killed later resumes from there."""
    config = CONFIGS["random"]().with_values(run={"checkpoint_minutes": 1e-9})
    play(config, tmp_path / "whole")
    found: list[int] = []

    def breaks() -> None:
        found.extend(
            game["env"]["hosts"][0]["training"]["epoch"]
            for game in state_of(tmp_path / "r")
        )
        raise KeyboardInterrupt

    Experiment(config, tmp_path / "r", [Does(at(1, 5), breaks)]).run()
    assert found == [4]
    Experiment.resume(tmp_path / "r").run()
    same_run(tmp_path / "r", tmp_path / "whole")


def test_finished_parts_of_the_comparison_are_not_played_again(tmp_path: Path) -> None:
    config = learning("planted", evaluation_pairs=4, rounds=1)
    whole, _ = play(config, tmp_path / "whole")
    arms = [e for e in stable_log(tmp_path / "whole") if e["event"] == "ArmPlayed"]
    third = arms[2]
    sink = Does(
        lambda e: (
            isinstance(e, ArmPlayed)
            and (e.controller, e.round) == (third["controller"], third["round"])
        ),
        lambda: None,
    )
    sink.what = lambda: signal.raise_signal(signal.SIGINT)
    Experiment(config, tmp_path / "r", [sink]).run()
    played = checkpoint.read(tmp_path / "r")["agent"]["compared"]
    assert sum(len(rounds) for rounds in played.values()) == 2
    again = Does(lambda _e: False, lambda: None)
    summary = Experiment.resume(tmp_path / "r", [again]).run()
    assert sum(isinstance(event, ArmPlayed) for event in again.events) == len(arms) - 2
    same_results(summary, whole)
    same_run(tmp_path / "r", tmp_path / "whole")


@pytest.mark.slow
def test_a_baseline_that_was_measured_is_kept_when_practice_is_stopped(
    tmp_path: Path,
) -> None:
    config = learning(rounds=1, ppo={"practice_steps": 1024})
    whole, _ = play(config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        Experiment(
            config,
            tmp_path / "r",
            [Does(lambda e: isinstance(e, PracticeRound) and e.round == 2, sends(2))],
        ).run()
    sink = Does(lambda _e: False, lambda: None)
    summary = Experiment.resume(tmp_path / "r", [sink]).run()
    assert not any(isinstance(event, BaselineMeasured) for event in sink.events)
    same_results(summary, whole)
    same_run(tmp_path / "r", tmp_path / "whole")


def test_a_run_stopped_between_a_round_and_its_update_resumes_there(
    whole: Runs, tmp_path: Path
) -> None:
    config = CONFIGS["ppo"]()
    folder, _ = whole("ppo")
    Experiment(
        config, tmp_path / "r", [Does(round_ends(1), sends(signal.SIGINT))]
    ).run()
    names = [e["event"] for e in read_events(tmp_path / "r" / "events.jsonl")]
    assert names[-3:] == ["RoundCompleted", "WorthsEstimated", "PolicyUpdated"]
    Experiment.resume(tmp_path / "r").run()
    same_run(tmp_path / "r", folder)


@pytest.mark.trap(30)
@pytest.mark.parametrize("name", slow_except(["random"], ["ppo", "random"]))
@pytest.mark.parametrize("where", ["play", "cut_logs"])
def test_a_run_stopped_while_it_loads_its_checkpoint_writes_nothing(
    name: str, where: str, whole: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-loaded state is not the run's, and logs are longer than the checkpoint until they are cut."""
    config = CONFIGS[name]()
    folder, _ = whole(name)
    Experiment(config, tmp_path / "r", [Does(at(1, 3), sends(signal.SIGINT))]).run()
    with (tmp_path / "r" / "events.jsonl").open("ab") as log:
        log.write(b'{"event": "Epoch')
    before = {path: path.read_bytes() for path in (tmp_path / "r").iterdir()}
    target = {
        "play": "esper.run.rollout.Rollout.load_state_dict",
        "cut_logs": "esper.files.run_folder.RunFolder.cut_logs",
    }
    with monkeypatch.context() as patch:
        patch.setattr(target[where], lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            Experiment.resume(tmp_path / "r").run()
    assert {path: path.read_bytes() for path in (tmp_path / "r").iterdir()} == before
    Experiment.resume(tmp_path / "r").run()
    same_run(tmp_path / "r", folder)


@pytest.mark.parametrize("make", slow_except([tiny], [tiny, learning]))
def test_a_signal_at_the_very_end_finds_the_run_finished(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    """No work is left to resume, and no event is reported twice; the signal still takes effect."""
    experiment = Experiment(
        make(rounds=1),
        tmp_path / "r",
        [Does(lambda e: isinstance(e, RunCompleted), sends(signal.SIGINT))],
    )
    with pytest.raises(KeyboardInterrupt):
        experiment.run()
    assert experiment.finished
    assert checkpoint.read(tmp_path / "r")["finished"]
    play(make(rounds=1), tmp_path / "whole")
    same_run(tmp_path / "r", tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "when"),
    [
        pytest.param("random", at(0, 3), marks=pytest.mark.slow),
        ("random", at(1, 2)),
        pytest.param("ppo", lambda e: isinstance(e, ArmPlayed), marks=pytest.mark.slow),
    ],
    ids=["first round", "second round", "comparison"],
)
def test_a_stopped_run_returns_and_is_resumed(
    name: str, when: Callable[[Event], bool], tmp_path: Path
) -> None:
    config = CONFIGS[name]().with_values(run={"evaluation_pairs": 2})
    play(config, tmp_path / "whole")
    experiment = Experiment(
        config, tmp_path / "r", [Does(when, lambda: experiment.stop())]
    )
    summary = experiment.run()
    assert summary.interrupted
    assert bool(summary.comparisons) == (summary.rounds == 1)
    assert not Experiment.resume(tmp_path / "r").run().interrupted
    same_run(tmp_path / "r", tmp_path / "whole")


def test_practice_can_be_stopped(tmp_path: Path) -> None:
    config = learning(rounds=1, ppo={"practice_steps": 1024})
    second = Does(
        lambda e: isinstance(e, PracticeRound) and e.round == 2,
        lambda: experiment.stop(),
    )
    experiment = Experiment(config, tmp_path / "r", [second])
    assert experiment.run().rounds == 0
    assert max(e.round for e in second.events if isinstance(e, PracticeRound)) == 2
