"""The workspace of cuBLAS on a GPU: bounded, the same for any number of streams, and the user's own choice stays."""

from __future__ import annotations

import pytest

from esper.env.make import EnvMaker
from esper.training.execution import workspaces
from esper.training.execution.workspaces import (
    DEFAULT,
    SETTING,
    VARIABLE,
    bound,
    describe,
    of_run,
    size_of,
)
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


def test_the_size_is_bounded_and_the_users_own_setting_wins() -> None:
    environment: dict[str, str] = {}
    bound(environment)
    assert environment == {VARIABLE: SETTING}
    assert size_of(SETTING) < DEFAULT
    environment = {VARIABLE: ":4096:8"}
    bound(environment)
    assert environment == {VARIABLE: ":4096:8"}


def test_a_run_sets_it_before_it_uses_a_gpu_and_never_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(workspaces, "bound", lambda: calls.append("bound"))
    task = digits()
    monkeypatch.setattr(
        type(task), "to", lambda task, device: calls.append(str(device)) or task
    )
    for device in ("cpu", "cuda:1", "cuda:0,cuda:1"):
        EnvMaker.of(tiny_config(2, 4, run={"device": device}), task)
    assert calls == ["cpu", "bound", "cuda:1", "bound", "cuda:0", "cuda:1"]


def test_a_run_reports_the_workspace_of_its_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert of_run("cpu", {}) is None
    assert (
        of_run("cuda:0,cuda:1", {VARIABLE: ":16:8"})
        == f"up to 0.125 MiB per stream ({VARIABLE}=:16:8)"
    )
    assert of_run("cuda", {}) == "up to 32 MiB per stream (PyTorch's default)"
    assert describe(None) is None
    monkeypatch.delenv(VARIABLE, raising=False)
    assert describe("13.0") == f"up to 8.125 MiB per stream ({VARIABLE}={SETTING})"
