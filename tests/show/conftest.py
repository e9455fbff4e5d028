"""Two tiny runs to report on, played once; tests that change a folder copy it first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.core_helpers import one_thread
from tests.run.run_helpers import learning, play, tiny

__all__ = ["one_thread"]

Edit = Callable[[dict[str, Any]], dict[str, Any] | None]


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An agent that practised and learned for three rounds; finished."""
    folder = tmp_path_factory.mktemp("report") / "learned"
    play(
        learning(evaluation_pairs=2, ppo={"practice_steps": 64, "practice_envs": 4}),
        folder,
    )
    return folder


@pytest.fixture(scope="session")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds of a schedule that keeps seeds; finished."""
    folder = tmp_path_factory.mktemp("report") / "grown"
    config = tiny("schedule", rounds=2).with_values(env={"episode_length": 24})
    play(config, folder)
    return folder


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a run folder, its events changed by a function that gives None for what is left out."""

    def make(folder: Path, edit: Edit | None = None, name: str = "copied") -> Path:
        there = tmp_path / name
        shutil.copytree(folder, there)
        if edit is not None:
            log = there / "events.jsonl"
            found = [edit(json.loads(line)) for line in log.read_text().splitlines()]
            log.write_text(
                "".join(
                    json.dumps(fields) + "\n" for fields in found if fields is not None
                )
            )
        return there

    return make


@pytest.fixture
def no_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are made and not drawn, which takes most of the time of a page."""
    monkeypatch.setattr(
        "esper.show.charts.inline_svg", lambda *_figure_and_words: "<svg></svg>"
    )
