"""Requirements of Esper's kernels on the NVIDIA driver, and what is reported if it lacks them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from esper.files import system_info as environment
from esper.training.execution import capabilities
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
        environment.workspaces, "describe", lambda: "up to 32 MiB per stream"
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
    monkeypatch.setattr(environment.workspaces, "describe", lambda: None)
    lines = environment.summary_lines()
    assert [line for line in lines if "driver: none; GPUs: none" in line]
    assert not [line for line in lines if "cuBLAS" in line]
