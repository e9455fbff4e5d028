"""Number of cores that this process may use: those of the machine, or fewer by a quota of its container."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from esper import _runtime

ROOT = Path("/")
CONTROLLER = "cpu"
"""Name of the controller of CPU time in version 1."""


def usable_cores() -> int:
    """Returns the physical cores that this process may run on, or the CPU time it may use if that is less, at least 1.

    A container (``docker --cpus``, limits in Kubernetes) may have less CPU time than its cores have; more threads than
    that would be stopped in the middle of their work.
    """
    quota = cpu_quota()
    cores = _runtime.physical_cores()
    if quota is None:
        return cores
    return max(1, min(cores, math.ceil(quota)))


def cpu_quota(root: Path = ROOT) -> float | None:
    """Returns the CPUs' worth of time that the control groups of this process may use; None without a limit.

    The limits of all groups above the process's own hold as well, so the smallest counts.
    https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files
    https://docs.kernel.org/scheduler/sched-bwc.html
    """
    limits = map(_limit, _groups(root))
    return min((limit for limit in limits if limit is not None), default=None)


def _groups(root: Path) -> Iterator[Path]:
    """Yields the folders of the process's groups that may limit CPU time, of both versions, up to the root group."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    base = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mounts = [base, base / "unified"]
        elif CONTROLLER in controllers.split(","):
            mounts = [base / CONTROLLER, base / controllers]
        else:
            continue
        # In a container with a namespace of its own, the path is as the host sees it, and the mount is the group.
        place = Path(path.lstrip("/"))
        for mount in mounts:
            yield from (mount / part for part in (place, *place.parents))


def _limit(group: Path) -> float | None:
    """Returns the limit of one group in CPUs; None if it has none, or there is no such group."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        if quota in ("max", "-1"):
            return None
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
