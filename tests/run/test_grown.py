"""Results of growing: explanations, interrupts and resuming, and warnings if training diverges."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import esper
from esper.cli.group import group
from esper.telemetry.event import EpochCompleted, Event
from tests.run.run_helpers import same_run, stable_log
from tests.run.test_grow import SCHEDULE, config, task

HOLDS = SCHEDULE[: SCHEDULE.rindex("[[action]]")]
"""The seed is blended in, and never kept."""
EARLY = """
[[action]]
epoch = 0
op = "GERMINATE"
slot = "r0c1"
blueprint = "norm"

[[action]]
epoch = 1
op = "ADVANCE"
slot = "r0c1"

[[action]]
epoch = 2
op = "PRUNE"
slot = "r0c1"
"""


Whole = tuple[str, Path, esper.Grown]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A controller, and the folder and the result of growing a host with it in one go."""
    root = tmp_path_factory.mktemp("whole")
    (root / "mine.toml").write_text(SCHEDULE)
    name = f"schedule:{root / 'mine.toml'}"
    grown = esper.grow(task(), name, epochs=7, config=config(), folder=root / "run")
    return name, root / "run", grown


@pytest.fixture
def schedule(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return f"schedule:{path}"

    return write


def told(grown: esper.Grown) -> str:
    """The text of ``grown`` in one line."""
    return " ".join(repr(grown).split())


def ctrl_c_after(epoch: int) -> Callable[[Event], None]:
    def callback(event: Event) -> None:
        if isinstance(event, EpochCompleted) and event.epoch == epoch:
            signal.raise_signal(signal.SIGINT)

    return callback


def test_a_seed_that_was_not_kept_is_explained(schedule: Callable[[str], str]) -> None:
    grown = esper.grow(task(), schedule(HOLDS), epochs=7, config=config())
    (seed,) = grown.tried
    assert (seed.slot, seed.blueprint, seed.planted, seed.stage) == (
        "r0c0",
        "conv_light",
        0,
        "HOLDING",
    )
    assert not seed.kept
    assert seed.standing.startswith("gate G5 was open, but schedule:")
    assert seed.contribution == grown.history[-1].contributions["r0c0"]
    assert grown.seeds == {}
    assert grown.alone is not None
    assert grown.gain == grown.accuracy - grown.alone
    text = told(grown)
    assert "kept no seed" in text
    assert (
        "conv_light in 3 (r0c0): planted at epoch 0, in HOLDING at the end: gate G5 was open"
        in text
    )
    assert "pp against" in text


def test_a_pruned_seed_is_named(
    schedule: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    (seed,) = esper.grow(
        task(), schedule(EARLY), epochs=3, config=config(), alone=False, progress=True
    ).tried
    assert seed.end == "pruned by the controller at epoch 2, in TRAINING"
    assert "run folder" in capsys.readouterr().out


def test_the_folder_of_grow_is_that_of_a_run(whole: Whole) -> None:
    _, folder, grown = whole
    assert [seed.end for seed in grown.tried] == ["kept at epoch 5"]
    shown = CliRunner().invoke(group, ["show", str(folder)])
    assert "finished: 1 round played and compared" in shown.output


def test_a_gate_that_held_a_seed_is_named(schedule: Callable[[str], str]) -> None:
    impossible = config(gates={"min_training_epochs": 50})
    (seed,) = esper.grow(
        task(), schedule(HOLDS), epochs=5, config=impossible, alone=False
    ).tried
    assert seed.stage == "TRAINING"
    assert "gate G2 was closed: epochs in TRAINING: 4, at least 50 required" in seed.end


def test_ctrl_c_returns_what_has_grown_and_the_same_call_continues(
    whole: Whole, tmp_path: Path
) -> None:
    name, folder, result = whole
    calls = {"epochs": 7, "config": config(), "folder": tmp_path / "r"}
    first = esper.grow(task(), name, **calls, callbacks=[ctrl_c_after(6)])
    assert first.interrupted
    assert len(first.history) == 6
    assert first.seeds == result.seeds
    assert first.alone is None
    assert "interrupted after 6 of 7 epochs; the same call continues" in told(first)
    rest = esper.grow(task(), name, **calls)
    assert not rest.interrupted
    assert (rest.accuracy, rest.alone, rest.tried) == (
        result.accuracy,
        result.alone,
        result.tried,
    )
    assert [epoch.epoch for epoch in rest.history] == list(range(1, 8))
    assert torch.equal(rest.network(task().test.x), result.network(task().test.x))
    same_run(tmp_path / "r", folder)
    again = f"is finished, .* load it with esper.load_host.*{tmp_path}/r/best_host"
    with pytest.raises(esper.ConfigError, match=again):
        esper.grow(task(), name, **calls)
    assert (tmp_path / "r" / "best_host.safetensors").exists()


def test_ctrl_c_before_anything_has_grown_is_raised(
    schedule: Callable[[str], str],
) -> None:
    def at_once(event: Event) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        esper.grow(
            task(), schedule(SCHEDULE), epochs=4, config=config(), callbacks=[at_once]
        )


def test_the_same_call_begins_anew_where_nothing_was_saved(
    schedule: Callable[[str], str], tmp_path: Path
) -> None:
    def before_a_checkpoint(event: Event) -> None:
        raise KeyboardInterrupt

    name = schedule(EARLY)
    folder = tmp_path / "r"

    def grow(epochs: int, **more: Any) -> esper.Grown:
        return esper.grow(
            task(),
            name,
            epochs=epochs,
            config=config(),
            folder=folder,
            alone=False,
            **more,
        )

    with pytest.raises(KeyboardInterrupt):
        grow(3, callbacks=[before_a_checkpoint])
    assert (folder / "config.toml").exists()
    assert not (folder / "checkpoint.pt").exists()
    with pytest.raises(esper.ConfigError, match=r"another env\.episode_length: give"):
        grow(4)
    (folder / "mine.txt").touch()
    with pytest.raises(
        esper.ConfigError, match="not empty; give a new or empty folder"
    ):
        grow(3)
    (folder / "mine.txt").unlink()
    assert len(grow(3).history) == 3


def test_the_host_alone_can_be_left_out_and_trained_later(
    whole: Whole, tmp_path: Path
) -> None:
    name, folder, both = whole
    for _ in range(2):
        grown = esper.grow(
            task(), name, epochs=7, config=config(), folder=tmp_path / "r", alone=False
        )
        assert (grown.alone, grown.gain, grown.interrupted) == (None, None, False)
        assert grown.accuracy == both.accuracy
        assert (tmp_path / "r" / "best_host.safetensors").exists()
    later = esper.grow(task(), name, epochs=7, config=config(), folder=tmp_path / "r")
    assert (later.accuracy, later.alone) == (both.accuracy, both.alone)
    assert stable_log(tmp_path / "r") == stable_log(folder)


def test_a_folder_of_other_arguments_is_refused(
    schedule: Callable[[str], str], tmp_path: Path
) -> None:
    name = schedule(SCHEDULE)
    esper.grow(
        task(),
        name,
        epochs=7,
        config=config(),
        folder=tmp_path / "r",
        callbacks=[ctrl_c_after(1)],
    )
    with pytest.raises(
        esper.ConfigError, match=r"another env\.episode_length: give the same arguments"
    ):
        esper.grow(task(), name, epochs=8, config=config(), folder=tmp_path / "r")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(esper.ConfigError, match="not empty"):
        esper.grow(task(), name, epochs=8, config=config(), folder=tmp_path / "full")


def test_training_that_diverges_is_warned_of(
    schedule: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    wild = config().with_values(task={"learning_rate": 1e6})
    with caplog.at_level(logging.WARNING):
        grown = esper.grow(task(), schedule(SCHEDULE), epochs=5, config=wild)
    assert "training diverged: epoch 1" in caplog.text
    assert any(
        "the host was restored as of epoch 0" in warning for warning in grown.warnings
    )
    assert "lower the learning rate (task.learning_rate is 1e+06)" in told(grown)


def test_a_callback_that_fails_is_dropped_and_named(
    schedule: Callable[[str], str],
) -> None:
    seen: list[Event] = []

    def fails(event: Event) -> None:
        seen.append(event)
        raise ValueError("no")

    grown = esper.grow(
        task(),
        schedule(SCHEDULE),
        epochs=2,
        config=config(),
        callbacks=[fails],
        alone=False,
    )
    assert len(seen) == 1
    assert grown.warnings[0].startswith("CallbackSink failed and was dropped: no;")
