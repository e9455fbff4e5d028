"""Memory of a run: of GPUs (torch's functions are replaced), of copies by host, and of the process."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from esper.telemetry import memory
from esper.telemetry.memory import (
    STATUS,
    by_kind,
    memory_used,
    memory_words,
    size,
)

MIB = 2**20
DEVICES = [torch.device("cuda:0"), torch.device("cuda:1")]


@pytest.fixture
def no_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "STATUS", tmp_path / "status")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU i has (i + 1) times 1, 2, 3 and 4 MiB; waiting for one is an error."""
    for place, name in enumerate(
        (
            "memory_allocated",
            "memory_reserved",
            "max_memory_allocated",
            "max_memory_reserved",
        ),
        1,
    ):
        monkeypatch.setattr(
            torch.cuda,
            name,
            lambda device, place=place: place * MIB * (device.index + 1),
        )

    def wait(*_arguments: object) -> None:
        raise AssertionError("a wait")

    monkeypatch.setattr(torch.cuda, "synchronize", wait)


@pytest.mark.usefixtures("gpus", "no_status")
def test_each_gpu_is_measured_by_itself_without_a_wait() -> None:
    used = memory_used([], DEVICES)
    assert used == {
        "allocated/cuda:0": MIB,
        "reserved/cuda:0": 2 * MIB,
        "peak_allocated/cuda:0": 3 * MIB,
        "peak_reserved/cuda:0": 4 * MIB,
        "allocated/cuda:1": 2 * MIB,
        "reserved/cuda:1": 4 * MIB,
        "peak_allocated/cuda:1": 6 * MIB,
        "peak_reserved/cuda:1": 8 * MIB,
    }
    assert by_kind(used) == {
        "allocated": 3 * MIB,
        "reserved": 6 * MIB,
        "peak_allocated": 9 * MIB,
        "peak_reserved": 12 * MIB,
    }


@pytest.mark.usefixtures("gpus", "no_status")
def test_a_gpu_without_a_number_is_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 7)
    for name in ("memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda _device: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert memory_used([], [torch.device("cuda")])["allocated/cuda:3"] == 7


@pytest.mark.usefixtures("no_status")
def test_copies_are_counted_in_total_and_for_the_largest_host_by_place() -> None:
    copies = [{"cuda:0": 10, "pinned": 5}, {"cuda:0": 30}, {"cuda:1": 7, "pinned": 6}]
    assert memory_used(copies, [torch.device("cpu")]) == {
        "copies/cuda:0": 40,
        "copies_per_host/cuda:0": 30,
        "copies/pinned": 11,
        "copies_per_host/pinned": 6,
        "copies/cuda:1": 7,
        "copies_per_host/cuda:1": 7,
    }


@pytest.mark.skipif(not STATUS.exists(), reason="resident memory is read from /proc")
def test_the_process_is_measured_if_the_system_reports_it() -> None:
    before = memory_used([], [])["resident/cpu"]
    with mmap.mmap(
        -1, 64 * MIB
    ) as fresh:  # an allocator may reuse pages that are resident already
        fresh.write(b"1" * len(fresh))
        assert memory_used([], [])["resident/cpu"] > before + 32 * MIB


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1.5 * MIB, "1.5 MiB"),
        (3.25 * 2**30, "3.2 GiB"),
    ],
)
def test_sizes_for_people(held: float, words: str) -> None:
    assert size(held) == words


def test_a_place_has_one_line() -> None:
    used = {
        "allocated/cuda:0": MIB,
        "peak_allocated/cuda:0": 2 * MIB,
        "copies/pinned": 512,
        "resident/cpu": 5 * 2**30,
    }
    assert memory_words(used) == [
        "cuda:0: allocated 1.0 MiB, peak allocated 2.0 MiB",
        "pinned: copies 512 B",
        "cpu: resident 5.0 GiB",
    ]
    assert memory_words({"resident": 1024}) == [
        "all: resident 1.0 KiB"
    ]  # of a metrics table
    assert memory_words({}) == []
