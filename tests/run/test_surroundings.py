"""A run is the same whatever its process has set for torch, numpy and matplotlib."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from esper import Experiment, TrainingConfig
from esper.compare.arms import read_arms
from esper.compare.comparison_run import ComparisonRun
from esper.config import ConfigError
from esper.files.grown_host import committed_network, export, load_host
from esper.files.policy import check_target
from esper.telemetry.sinks.jsonl import JsonlSink
from tests.files.test_grown_host import fossil
from tests.grower.loops import Loop
from tests.ops.test_torch_state import STATES, state_of_torch

TABLES: dict[str, Any] = {
    "task": {"name": "planted"},
    "env": {"n_envs": 2, "episode_length": 4},
}
CONFIG = TrainingConfig.parse(
    {
        "run": {"rounds": 1, "controller": "ppo", "evaluation_pairs": 2},
        **TABLES,
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


def in_a_loop(folder: str) -> None:
    Loop(folder=folder).run(2).grower.close()


def a_comparison(folder: str) -> None:
    arms = read_arms(("none", "random"), TABLES)
    assert ComparisonRun(arms, 1, folder).run()
    assert ComparisonRun.resume(folder).run()


def a_grown_host(stem: str) -> None:
    network = committed_network(fossil("LINEAR_ADD"))
    export(network, stem)
    load_host(stem)


def a_policy(file: str) -> None:
    target = check_target(f"{file}.safetensors")
    target.write_bytes(b"")


DOORS: dict[str, Callable[[str], Any]] = {
    "Experiment": partial(Experiment, CONFIG),
    "Grower": in_a_loop,
    "ComparisonRun": a_comparison,
    "export": a_grown_host,
    "save_policy": a_policy,
    "sinks": JsonlSink,
}


@pytest.mark.parametrize("door", DOORS)
def test_the_home_folder_stands_in_for_a_tilde_at_every_door(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    found = DOORS[door]("~/named")
    assert list(here.iterdir()) == []
    assert [*home.iterdir()] or found.folder == home / "named"


@pytest.mark.parametrize("door", ["Experiment", "Grower", "ComparisonRun", "export"])
def test_an_empty_path_is_refused_at_every_door(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="the path is empty"):
        DOORS[door]("")
    assert list(tmp_path.iterdir()) == []
