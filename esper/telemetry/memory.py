"""How much memory a run uses: on its GPUs, in the process, and for the copies of hosts that it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
"""What Linux tells of the process."""

MEMORY = {
    "allocated": "tensors on a GPU",
    "reserved": "what torch's allocator holds of a GPU",
    "peak_allocated": "the most allocated since the process began",
    "peak_reserved": "the most reserved since the process began",
    "copies": "copies of all hosts: two snapshots each, and the start of the epoch",
    "copies_per_host": "copies of the host that has most of them there",
    "resident": "the process in CPU memory",
}
"""Kinds of memory and what they count, in the order of their columns in the metrics."""


def memory_used(copies: Sequence[Mapping[str, int]], devices: Iterable[torch.device]) -> dict[str, int]:
    """Bytes in use now by ``KIND/PLACE``; nothing waits for a GPU.

    Kinds are those of ``MEMORY``; places are ``cpu``, ``cuda:0``, ... and ``pinned``, which is CPU memory that a GPU
    reads. What cannot be known here is left out.

    Args:
        copies: bytes of the copies of each host, by place.
        devices: where hosts train.
    """
    used: dict[str, int] = {}
    for device in devices:
        if device.type == "cuda":
            place = f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
            used[f"allocated/{place}"] = torch.cuda.memory_allocated(device)
            used[f"reserved/{place}"] = torch.cuda.memory_reserved(device)
            used[f"peak_allocated/{place}"] = torch.cuda.max_memory_allocated(device)
            used[f"peak_reserved/{place}"] = torch.cuda.max_memory_reserved(device)
    total: Counter[str] = Counter()
    for host in copies:
        total.update(host)
    for place, held in total.items():
        used[f"copies/{place}"] = held
        used[f"copies_per_host/{place}"] = max(host.get(place, 0) for host in copies)
    if STATUS.exists():
        used["resident/cpu"] = resident("VmRSS")
    return used


def resident(field: str) -> int:
    """VmRSS, what the process has in memory now, or VmHWM, the most since that was forgotten; bytes.

    Not ``ru_maxrss``, which a process inherits from the one that started it.
    """
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def by_kind(used: Mapping[str, int]) -> dict[str, int]:
    """The bytes of :func:`memory_used` by kind, over all places."""
    total: Counter[str] = Counter()
    for name, held in used.items():
        total[name.partition("/")[0]] += held
    return dict(total)


def memory_words(used: Mapping[str, int]) -> list[str]:
    """One line for each place: ``cuda:0: allocated 1.5 GiB, reserved 2.0 GiB, ...``."""
    places: dict[str, list[str]] = {}
    for name, held in used.items():
        kind, _, place = name.partition("/")
        places.setdefault(place or "all", []).append(f"{kind.replace('_', ' ')} {size(held)}")
    return [f"{place}: {', '.join(told)}" for place, told in places.items()]


def size(held: float) -> str:
    """Bytes for people, in the largest unit of which there is at least one."""
    for unit in ("B", "KiB", "MiB"):
        if held < 1024:
            return f"{held:.0f} B" if unit == "B" else f"{held:.1f} {unit}"
        held /= 1024
    return f"{held:.1f} GiB"
