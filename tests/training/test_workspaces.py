"""Memory that cuBLAS works in on a GPU: bounded, chosen once, and the user's own choice stays."""

from __future__ import annotations

import pytest

from esper.env.make import EnvMaker
from esper.training import workspaces
from esper.training.workspaces import DEFAULT, SETTINGS, TOTAL, VARIABLE, Workspaces, describe, setting_for, size_of
from tests.core_helpers import digits, tiny_config

MIB = 2**20


@pytest.mark.parametrize(
    ("setting", "size"),
    [
        (":4096:8", 32 * MIB),
        (":4096:2:16:8", 8 * MIB + 128 * 1024),
        (":16:8", 128 * 1024),
        (":1024:1", MIB),
        ("0", DEFAULT),
        ("", DEFAULT),
    ],
)
def test_a_setting_is_read_as_pytorch_does(setting: str, size: int) -> None:
    assert size_of(setting) == size


@pytest.mark.parametrize(
    ("lanes", "setting"),
    [
        *((lanes, None) for lanes in (1, 16)),
        *((lanes, ":4096:2:16:8") for lanes in (17, 40, 63)),
        *((lanes, ":2048:1") for lanes in (64, 256)),
        *((lanes, ":1024:1") for lanes in (257, 512, 5000)),
    ],
)
def test_more_lanes_have_less_each(lanes: int, setting: str | None) -> None:
    assert setting_for(lanes) == setting
    size = DEFAULT if setting is None else size_of(setting)
    assert lanes * size <= TOTAL or setting == SETTINGS[-1]


def test_what_is_chosen_stays_for_the_life_of_the_process() -> None:
    environment: dict[str, str] = {}
    process = Workspaces(environment)
    assert str(process.workspace) == "up to 32 MiB a lane (PyTorch's default)"
    process.bound(40)
    assert environment == {VARIABLE: ":4096:2:16:8"}
    for lanes in (1, 5000):
        process.bound(lanes)
        assert environment == {VARIABLE: ":4096:2:16:8"}
    assert str(process.workspace) == f"up to 8.125 MiB a lane ({VARIABLE}=:4096:2:16:8, set by Esper)"


def test_a_default_that_has_been_used_stays_too() -> None:
    environment: dict[str, str] = {}
    process = Workspaces(environment)
    process.bound(2)
    process.bound(40)
    assert environment == {}


@pytest.mark.parametrize("lanes", [2, 40, 5000])
def test_the_users_own_setting_wins(lanes: int) -> None:
    environment = {VARIABLE: ":4096:8"}
    process = Workspaces(environment)
    process.bound(lanes)
    assert environment == {VARIABLE: ":4096:8"}
    assert str(process.workspace) == f"up to 32 MiB a lane ({VARIABLE}=:4096:8)"


def test_a_run_chooses_before_it_uses_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts of the baseline have lanes, too: 41 on one GPU, 21 on the first of two; none on a CPU."""
    calls: list[object] = []
    monkeypatch.setattr(workspaces.WORKSPACES, "bound", calls.append)
    task = digits()
    monkeypatch.setattr(type(task), "to", lambda task, device: calls.append(str(device)) or task)
    for device in ("cpu", "cuda:1", "cuda:0,cuda:1"):
        EnvMaker.of(tiny_config(38, 4, run={"device": device}, env={"baseline_episodes": 3}), task)
    assert calls == ["cpu", 41, "cuda:1", 21, "cuda:0", "cuda:1"]


def test_who_asks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "WORKSPACES", Workspaces({}))
    assert describe(None) is None
    said = describe("13.0")
    assert said == "up to 32 MiB a lane (PyTorch's default); smaller with more than 16 lanes, for 512 MiB in all"


def test_a_run_tells_what_its_lanes_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "WORKSPACES", Workspaces({VARIABLE: ":16:8"}))
    assert workspaces.of_run("cpu") is None
    assert workspaces.of_run("cuda:0, cuda:1") == f"up to 0.125 MiB a lane ({VARIABLE}=:16:8)"
