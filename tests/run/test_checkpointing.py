"""Times at which a run saves its state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from esper.config import RunConfig
from esper.files import checkpoint
from esper.run import checkpointing
from esper.run.checkpointing import Checkpoints


class Folder:
    """A run folder that keeps the states written to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: list[tuple[Any, bool, bool]] = []
        """Round, whether it is finished, and whether the last checkpoint is kept."""

    def log_sizes(self) -> dict[str, int]:
        return {"events.jsonl": 7}

    def write_checkpoint(self, content: bytes, keep: bool = True) -> None:
        state = json.loads(content)
        assert state["logs"] == {"events.jsonl": 7}
        self.written.append((state["round"], state["finished"], keep))


class Run:
    """A run in some round, with a clock that the test moves."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        intact: bool = True,
        **config: Any,
    ) -> None:
        self.now, self.round, self.folder = 0.0, 0, Folder(folder)
        (folder / checkpoint.CONFIG).write_text("")
        monkeypatch.setattr(checkpointing.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(
            checkpoint, "encode", lambda state: json.dumps(state).encode()
        )
        files: Any = self.folder
        self.checkpoints = Checkpoints(
            files, RunConfig(**config), lambda: {"round": self.round}, intact
        )

    @property
    def rounds(self) -> list[Any]:
        return [number for number, _, _ in self.folder.written]

    def play(self, number: int) -> None:
        self.round = number
        self.checkpoints.save_round(number)


def test_rounds_are_written_as_often_as_the_config_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, checkpoint_every=3)
    for number in range(1, 8):
        run.play(number)
    assert run.rounds == [3, 6]
    run.round = 99
    run.checkpoints.write()
    run.checkpoints.write()
    assert run.rounds == [3, 6, 7], "the state after the last round, and once"


def test_a_long_round_is_written_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, checkpoint_every=100, checkpoint_minutes=2.0)
    for minute in (1.0, 2.0, 2.1, 4.0, 4.2):
        run.now, run.round = 60 * minute, minute
        run.checkpoints.save_by_the_clock()
    assert run.rounds == [2.1, 4.2]


def test_a_damaged_checkpoint_is_not_kept_beside_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, intact=False)
    run.checkpoints.save()
    run.checkpoints.save(finished=True)
    assert run.folder.written == [(0, False, False), (0, True, True)]
