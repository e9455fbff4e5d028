"""Checkpoint files are intact or absent, execute no code, and are refused with the reason."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies

from esper.agents.make import controller_for
from esper.config import ConfigError, TrainingConfig
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import SimParams
from esper.files import checkpoint
from esper.run.experiment import Experiment
from tests.run.run_helpers import (
    flat,
    learning,
    play,
)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose agent learned from simulated hosts."""
    summary, _ = play(
        learning("planted", n_envs=4, rounds=2),
        tmp_path_factory.mktemp("runs") / "agent",
    )
    return summary.folder


@pytest.fixture(scope="module")
def chance(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose controller does not learn."""
    summary, _ = play(
        learning("planted", n_envs=4, rounds=1, controller="random"),
        tmp_path_factory.mktemp("r") / "c",
    )
    return summary.folder


def planted(n_envs: int = 4, episode_length: int = 4, **law: Any) -> PlantedVectorEnv:
    env = {"n_envs": n_envs, "episode_length": episode_length}
    config = TrainingConfig.parse({"task": {"name": "planted"}, "env": env})
    return PlantedVectorEnv(config, SimParams(**law))


def test_the_file_on_disk_is_whole_while_the_next_is_written(
    agent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment of a write there is one checkpoint that can be read: the old one or the new one."""
    state = checkpoint.read(agent)
    seen: list[int] = []
    fsync = os.fsync

    def watching(descriptor: int) -> None:
        seen.append(checkpoint.read(tmp_path)["round"])
        fsync(descriptor)

    checkpoint.write(tmp_path, checkpoint.encode({**state, "round": 0}))
    monkeypatch.setattr(os, "fsync", watching)
    for number in (1, 2, 3):
        checkpoint.write(tmp_path, checkpoint.encode({**state, "round": number}))
    assert set(seen) == {0, 1, 2}
    assert not list(tmp_path.glob("*.part"))


def test_encoded_state_comes_back_as_it_was(tmp_path: Path, agent: Path) -> None:
    state = checkpoint.read(agent)
    checkpoint.write(tmp_path, checkpoint.encode(state))
    assert flat(checkpoint.read(tmp_path)) == flat(state)
    assert flat(checkpoint.read(tmp_path / checkpoint.NAME)) == flat(state)


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def sealed(value: Any) -> bytes:
    """The content of a checkpoint file with a valid checksum."""
    return checkpoint.encode(value)


FOREIGN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a checkpoint"),
    "a zip": (b"PK\x03\x04" + bytes(100), "is not a checkpoint"),
    "torch's": (
        saved({"layer.weight": torch.zeros(2)}),
        "it does not begin with the header of an Esper checkpoint",
    ),
    "weights": (
        sealed({"layer.weight": torch.zeros(2)}),
        "of a run: missing or invalid agent, baseline, best, collector",
    ),
    "a list": (sealed([1, 2]), "is not a checkpoint: it contains list, not dict"),
    "another format": (
        b"Esper checkpoint, format 99\n\n",
        "but this version of Esper reads format 9",
    ),
    "another content": (
        sealed({"round": 1})[:-1] + b"x",
        "it is truncated or was modified: its SHA-256 differs",
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_foreign_file_is_refused_by_its_name(case: str, tmp_path: Path) -> None:
    content, message = FOREIGN[case]
    (tmp_path / "mine.pt").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as found:
        checkpoint.read(tmp_path / "mine.pt")
    assert str(tmp_path / "mine.pt") in str(found.value)
    assert len(str(found.value).splitlines()) == 1


@settings(max_examples=50, deadline=None)
@given(data=strategies.data())
def test_no_change_of_a_checkpoint_is_read(
    data: strategies.DataObject, agent: Path
) -> None:
    """Any changed, removed or inserted bytes are a ConfigError that names the file."""
    whole = (agent / checkpoint.NAME).read_bytes()
    start = data.draw(strategies.integers(0, len(whole) - 1))
    end = data.draw(strategies.integers(start, min(len(whole), start + 64)))
    other = data.draw(strategies.binary(max_size=64))
    changed = whole[:start] + other + whole[end:]
    assume(changed != whole)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "mine.pt"
        file.write_bytes(changed)
        with pytest.raises(ConfigError, match=r"mine\.pt is not a checkpoint"):
            checkpoint.read(file)


PLAIN = strategies.recursive(
    strategies.none()
    | strategies.booleans()
    | strategies.integers(-(2**60), 2**60)
    | strategies.floats()
    | strategies.text(max_size=5)
    | strategies.just(torch.zeros(2)),
    lambda part: (
        strategies.lists(part, max_size=3)
        | strategies.dictionaries(strategies.text(max_size=5), part)
    ),
    max_leaves=6,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a state, with the key of one of its parts."""
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, list):
        parts = list(enumerate(value))
    return [(value, key) for key, _ in parts] + [
        place for _, part in parts for place in places(part)
    ]


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chosen=strategies.integers(0, 10**6), value=PLAIN, dropped=strategies.booleans())
def test_a_checkpoint_with_a_valid_checksum_and_wrong_values_is_refused(
    chosen: int, value: Any, dropped: bool, agent: Path
) -> None:
    """One part of the state, at any depth, is missing or replaced, under a valid checksum.

    The file is refused with a ConfigError, or its policy can be played.
    """
    state = {**checkpoint.read(agent), "finished": False}
    found = places(state)
    container, key = found[chosen % len(found)]
    if dropped:
        del container[key]
    else:
        container[key] = value
    with TemporaryDirectory() as place:
        folder = Path(place) / "r"
        shutil.copytree(agent, folder)
        (folder / checkpoint.NAME).write_bytes(checkpoint.encode(state))
        (folder / checkpoint.PREVIOUS).unlink(missing_ok=True)
        with contextlib.suppress(ConfigError):
            Experiment.resume(folder).run()
        with contextlib.suppress(ConfigError):
            controller_for(f"checkpoint:{folder}", TrainingConfig(), planted(), 0)


def torn(folder: Path) -> str:
    file = folder / checkpoint.NAME
    file.write_bytes(file.read_bytes()[:-100])
    return "truncated or was modified"


def gone(folder: Path) -> str:
    (folder / checkpoint.NAME).unlink()
    return ""


def foreign(folder: Path) -> str:
    """An intact checkpoint of another run."""
    file = folder / checkpoint.NAME
    file.write_bytes(
        checkpoint.encode({**checkpoint.read_file(file), "config": "0" * 64})
    )
    return "was written by a run with a different configuration"


@pytest.mark.parametrize("harm", [torn, gone, foreign])
def test_a_checkpoint_that_cannot_be_used_is_named_and_the_one_before_it_is_used(
    harm: Callable[[Path], str], agent: Path, tmp_path: Path
) -> None:
    shutil.copytree(agent, tmp_path / "r")
    before = checkpoint.read_file(tmp_path / "r" / checkpoint.PREVIOUS)["round"]
    why = harm(tmp_path / "r")
    found = checkpoint.newest(tmp_path / "r")
    assert found.file.name == checkpoint.PREVIOUS
    assert found.state["round"] == before
    for message in found.refused:
        assert str(tmp_path / "r" / checkpoint.NAME) in message
        assert why in message
    assert len(found.refused) == bool(why)


def enough() -> None:
    raise KeyboardInterrupt


def test_two_checkpoints_that_cannot_be_used_are_both_named(
    agent: Path, tmp_path: Path
) -> None:
    shutil.copytree(agent, tmp_path / "r")
    for name in (checkpoint.NAME, checkpoint.PREVIOUS):
        (tmp_path / "r" / name).write_bytes(b"")
    with pytest.raises(
        ConfigError, match=r"checkpoint\.pt is not .*checkpoint\.previous\.pt is not"
    ):
        Experiment.resume(tmp_path / "r")


def test_an_edited_configuration_is_not_resumed(agent: Path, tmp_path: Path) -> None:
    shutil.copytree(agent, tmp_path / "r")
    config = tmp_path / "r" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 9"))
    with pytest.raises(
        ConfigError, match=r"different configuration than .*config\.toml"
    ):
        Experiment.resume(tmp_path / "r")


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "gone", tmp_path):
        with pytest.raises(ConfigError, match="no checkpoint at") as found:
            checkpoint.read(path)
        assert str(path) in str(found.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/checkpoint\.pt cannot be read"):
        Experiment.resume(tmp_path / "file")


def test_a_run_that_learned_nothing_has_no_policy_to_play(chance: Path) -> None:
    with pytest.raises(
        ConfigError, match="contains no policy: its controller random does not learn"
    ) as found:
        controller_for(f"checkpoint:{chance}", TrainingConfig(), planted(), 0)
    assert str(chance) in str(found.value)


ROWS = ((3.0, 8.0, -4.0), (-3.0, 3.0, 9.0))
