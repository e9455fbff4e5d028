"""The report on the devices of a machine, and the workspaces of cuBLAS."""

from __future__ import annotations

from pathlib import Path

import pytest

from esper.env.make import EnvMaker
from esper.files import system_info as environment
from esper.training.execution import capabilities
from esper.training.execution.capabilities import (
    WORKSPACE_SETTING,
    WORKSPACE_VARIABLE,
    bound_workspaces,
    workspace_setting,
)
from tests.core_helpers import digits, tiny_config
from tests.runtime.fake_cudart import Fake, compile_fake


@pytest.mark.parametrize(("serves", "expected"), [(0, None), (12010, "12.1")])
def test_the_driver_is_asked_through_the_runtime(
    serves: int, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(compile_fake(tmp_path))
    fake.driver_version = serves
    inner = capabilities.CudaRuntime
    monkeypatch.setattr(capabilities, "CudaRuntime", lambda: inner(str(fake.path)))
    assert capabilities.driver_version() == expected
    assert fake.contexts == set()


def test_info_names_the_driver_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "device_capabilities", dict)
    monkeypatch.setattr(capabilities, "driver_version", lambda: "12.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: f"GPU {number}")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    lines = environment.summary_lines()
    assert any("driver: CUDA 12.0; GPUs: GPU 0, GPU 1" in line for line in lines)
    assert f"cuBLAS workspaces: {workspace_setting()}" in lines


def test_the_size_is_bounded_and_the_users_own_setting_wins() -> None:
    environment: dict[str, str] = {}
    bound_workspaces(environment)
    assert environment == {WORKSPACE_VARIABLE: WORKSPACE_SETTING}
    environment = {WORKSPACE_VARIABLE: ":4096:8"}
    bound_workspaces(environment)
    assert environment == {WORKSPACE_VARIABLE: ":4096:8"}


def test_a_run_sets_it_before_it_uses_a_gpu_and_never_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(
        "esper.env.make.bound_workspaces", lambda: calls.append("bound")
    )
    task = digits()
    monkeypatch.setattr(
        type(task), "to", lambda task, device: calls.append(str(device)) or task
    )
    for device in ("cpu", "cuda:1", "cuda:0,cuda:1"):
        EnvMaker.of(tiny_config(2, 4, run={"device": device}), task)
    assert calls == ["cpu", "bound", "cuda:1", "bound", "cuda:0", "cuda:1"]
