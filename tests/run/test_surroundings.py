"""A run is the same whatever its process has set for torch, numpy and matplotlib."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from esper import Experiment, TrainingConfig
from tests.ops.test_torch_state import STATES, state_of_torch

CONFIG = TrainingConfig.parse(
    {
        "run": {"rounds": 1, "controller": "ppo", "evaluation_pairs": 2},
        "task": {"name": "planted"},
        "env": {"n_envs": 2, "episode_length": 4},
        "ppo": {"practice_steps": 0},
    }
)


class ErrorsOfWarnings(warnings.catch_warnings):  # type: ignore[type-arg]
    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("error")


class Deterministic(AbstractContextManager[None]):
    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_error: object) -> None:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    **STATES,
    "warnings as errors": ErrorsOfWarnings,
    "deterministic algorithms": Deterministic,
}


def played(folder: Path) -> str:
    """The columns of a run's metrics that are neither times nor memory."""
    Experiment(CONFIG, folder).run()
    rows = [row.split(",") for row in (folder / "metrics.csv").read_text().splitlines()]
    count = rows[0].index("samples")
    return "\n".join(",".join(row[:count]) for row in rows)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return played(tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.slow
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_a_run_has_the_same_results_in_any_surroundings(
    surroundings: str, expected: str, tmp_path: Path
) -> None:
    with SURROUNDINGS[surroundings]():
        before = state_of_torch()
        assert played(tmp_path / "run") == expected
        assert state_of_torch() == before


@pytest.mark.slow
def test_a_run_in_another_thread_has_the_same_results(
    expected: str, tmp_path: Path
) -> None:
    found = []
    thread = Thread(target=lambda: found.append(played(tmp_path / "run")))
    thread.start()
    thread.join()
    assert found == [expected]


def test_the_home_folder_stands_in_for_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Experiment(CONFIG, "~/run").folder == tmp_path / "run"
