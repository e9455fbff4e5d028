"""Requirements of Esper's kernels on the NVIDIA driver, and what is reported if it lacks them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from esper.env.make import EnvMaker
from esper.files import system_info as environment
from esper.training.execution import capabilities
from esper.training.execution.capabilities import (
    WORKSPACE_BYTES,
    WORKSPACE_SETTING,
    WORKSPACE_VARIABLE,
    bound_workspaces,
    describe_workspace,
    run_workspace,
    workspace_size,
)
from tests.core_helpers import digits, tiny_config
from tests.runtime.fake_cudart import Fake, compile_fake

KERNELS = Path(__file__).parents[3] / "csrc" / "cuda"


@pytest.mark.parametrize("capability", [(7, 0), (8, 9), (9, 0), (12, 1)])
@pytest.mark.parametrize("version", [12010, 12080, 13000])
def test_a_new_driver_has_all_that_kernels_need(
    version: int, capability: tuple[int, int]
) -> None:
    assert capabilities.what_kernels_lack(version, capability) is None


@pytest.mark.parametrize("version", [11080, 12000])
def test_an_old_driver_is_named_with_what_repairs_it(version: int) -> None:
    said = capabilities.what_kernels_lack(version, (8, 0))
    assert said is not None
    assert (
        f"it supports CUDA {capabilities.version_text(version)}, and CUDA 12.1 is needed"
        in said
    )
    assert "install NVIDIA driver 530 or newer" in said


def test_an_old_gpu_is_not_helped_by_a_driver() -> None:
    said = capabilities.what_kernels_lack(13000, (6, 1))
    assert said is not None
    assert (
        "compute capability 6.1 does not have; it needs a GPU of 7.0 or newer" in said
    )
    assert "driver" not in said


def test_without_a_driver_nothing_is_claimed() -> None:
    assert capabilities.what_kernels_lack(None, (9, 0)) is None


@pytest.mark.parametrize(
    ("file", "tensors"),
    [
        ("grad_stats", capabilities.STATS_TENSORS),
        ("sgd", capabilities.STEP_TENSORS),
        ("adamw", capabilities.STEP_TENSORS),
    ],
)
def test_the_numbers_of_tensors_are_those_of_the_kernels(
    file: str, tensors: int
) -> None:
    source = (KERNELS / f"{file}.cu").read_text(encoding="utf-8")
    found = re.findall(r"kSmallCapacity = (\d+);", source)
    assert found == [str(tensors)]
    assert "<= 4096);" in source
    assert "<= 32764);" in source


@pytest.mark.parametrize(("serves", "expected"), [(0, None), (12000, 12000)])
def test_the_driver_is_asked_through_the_runtime(
    serves: int, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(compile_fake(tmp_path))
    fake.driver_version = serves
    inner = capabilities.CudaRuntime
    monkeypatch.setattr(capabilities, "CudaRuntime", lambda: inner(str(fake.path)))
    assert capabilities.driver_version() == expected
    assert fake.contexts == set()


def test_info_names_the_driver_and_each_gpu_that_lacks_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capabilities, "device_capabilities", dict)
    monkeypatch.setattr(capabilities, "driver_version", lambda: 12000)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: f"GPU {number}")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _number: (9, 0))
    monkeypatch.setattr(
        capabilities, "describe_workspace", lambda: "up to 32 MiB per stream"
    )
    lines = environment.summary_lines()
    (place,) = (
        i
        for i, line in enumerate(lines)
        if "driver: CUDA 12.0; GPUs: GPU 0, GPU 1" in line
    )
    assert [line.split()[0] for line in lines[place + 1 : place + 3]] == [
        "cuda:0",
        "cuda:1",
    ]
    assert all(
        "install NVIDIA driver 530" in line for line in lines[place + 1 : place + 3]
    )
    assert lines[place + 3] == "cuBLAS workspaces: up to 32 MiB per stream"


def test_info_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "driver_version", lambda: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(capabilities, "describe_workspace", lambda: None)
    lines = environment.summary_lines()
    assert [line for line in lines if "driver: none; GPUs: none" in line]
    assert not [line for line in lines if "cuBLAS" in line]


MIB = 2**20


@pytest.mark.parametrize(
    ("setting", "size"),
    [
        (":4096:8", 32 * MIB),
        (":4096:2:16:8", 8 * MIB + 128 * 1024),
        (":16:8", 128 * 1024),
        (":1024:1", MIB),
        ("0", WORKSPACE_BYTES),
        ("", WORKSPACE_BYTES),
    ],
)
def test_a_setting_is_read_as_pytorch_does(setting: str, size: int) -> None:
    assert workspace_size(setting) == size


def test_the_size_is_bounded_and_the_users_own_setting_wins() -> None:
    environment: dict[str, str] = {}
    bound_workspaces(environment)
    assert environment == {WORKSPACE_VARIABLE: WORKSPACE_SETTING}
    assert workspace_size(WORKSPACE_SETTING) < WORKSPACE_BYTES
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


def test_a_run_reports_the_workspace_of_its_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run_workspace("cpu", {}) is None
    assert (
        run_workspace("cuda:0,cuda:1", {WORKSPACE_VARIABLE: ":16:8"})
        == f"up to 0.125 MiB per stream ({WORKSPACE_VARIABLE}=:16:8)"
    )
    assert run_workspace("cuda", {}) == "up to 32 MiB per stream (PyTorch's default)"
    assert describe_workspace(None) is None
    monkeypatch.delenv(WORKSPACE_VARIABLE, raising=False)
    assert (
        describe_workspace("13.0")
        == f"up to 8.125 MiB per stream ({WORKSPACE_VARIABLE}={WORKSPACE_SETTING})"
    )
