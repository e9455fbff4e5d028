"""Measures the memory of a run: of its GPUs, of the process, and of the copies of hosts that it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

STATUS = Path("/proc/self/status")
"""Linux's report about the process."""

MEMORY = {
    "allocated": "tensors on a GPU",
    "reserved": "GPU memory held by torch's allocator",
    "peak_allocated": "the most allocated since the process began",
    "peak_reserved": "the most reserved since the process began",
    "copies": "snapshots of all hosts, two each",
    "copies_per_host": "snapshots of the host with the largest",
    "resident": "the process in CPU memory",
}
"""Meanings of the kinds of memory, in the order of their columns in the metrics."""


def memory_used(copies: Sequence[Mapping[str, int]], devices: Iterable[torch.device]) -> dict[str, int]:
    """Returns the bytes in use now by ``KIND/PLACE``, without waiting for a GPU; unknown values are left out.

    Kinds are those of ``MEMORY``; places are ``cpu``, ``cuda:0``, ...

    Args:
        copies: bytes of the copies of each host, by place.
        devices: the devices on which hosts train.
    """
    import torch  # `esper show` reads the names in this file, and is quick without torch

    used: dict[str, int] = {}
    for device in devices:
        if device.type != "cuda":
            continue
        index = torch.cuda.current_device() if device.index is None else device.index
        used[f"allocated/cuda:{index}"] = torch.cuda.memory_allocated(device)
        used[f"reserved/cuda:{index}"] = torch.cuda.memory_reserved(device)
        used[f"peak_allocated/cuda:{index}"] = torch.cuda.max_memory_allocated(device)
        used[f"peak_reserved/cuda:{index}"] = torch.cuda.max_memory_reserved(device)
    for place in dict.fromkeys(chain.from_iterable(copies)):
        held = [host.get(place, 0) for host in copies]
        used[f"copies/{place}"] = sum(held)
        used[f"copies_per_host/{place}"] = max(held)
    if STATUS.exists():
        used["resident/cpu"] = resident()
    return used


def resident() -> int:
    """Returns the bytes of the process in memory now."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def by_kind(used: Mapping[str, int]) -> dict[str, int]:
    """Sums the bytes of :func:`memory_used` over all places, by kind."""
    total: Counter[str] = Counter()
    for name, held in used.items():
        total[name.partition("/")[0]] += held
    return dict(total)


def memory_words(used: Mapping[str, int]) -> list[str]:
    """Formats one line per place: ``cuda:0: allocated 1.5 GiB, reserved 2.0 GiB, ...``."""
    places: dict[str, list[str]] = {}
    for name, held in used.items():
        kind, _, place = name.partition("/")
        words = f"{kind.replace('_', ' ')} {size(held)}"
        places.setdefault(place or "all", []).append(words)
    return [f"{place}: {', '.join(words)}" for place, words in places.items()]


def size(held: float) -> str:
    """Formats bytes for people, in the largest unit that gives at least 1."""
    for unit in ("B", "KiB", "MiB"):
        if held < 1024:
            return f"{held:.0f} B" if unit == "B" else f"{held:.1f} {unit}"
        held /= 1024
    return f"{held:.1f} GiB"
