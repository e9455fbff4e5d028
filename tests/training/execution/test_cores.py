"""The cores that a process may use, under the CPU quotas of control groups in fake file systems."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from esper import _runtime
from esper.training.execution import cores

V2 = "0::/kubepods/pod\n"
V1 = "3:cpu,cpuacct:/docker/x\n1:memory:/docker/x\n0::/\n"


def system(root: Path, groups: str, files: Mapping[str, str]) -> Path:
    """Writes a file system whose process is in ``groups``; ``files`` lie below /sys/fs/cgroup."""
    for name, text in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{n}": t for n, t in files.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        (V2, {"kubepods/pod/cpu.max": "150000 100000\n"}, 1.5),
        (
            V2,
            {
                "kubepods/pod/cpu.max": "max 100000\n",
                "kubepods/cpu.max": "50000 100000\n",
            },
            0.5,
        ),
        (
            V2,
            {
                "kubepods/pod/cpu.max": "300000 100000\n",
                "kubepods/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        (V2, {"kubepods/pod/cpu.max": "max 100000\n"}, None),
        (
            V2,
            {"cpu.max": "100000 50000\n"},
            2.0,
        ),  # a namespace of its own: the mount is the group
        (V2, {"kubepods/pod/cpu.max": "what\n"}, None),
        (V2, {}, None),
        (
            V1,
            {
                "cpu/docker/x/cpu.cfs_quota_us": "100000\n",
                "cpu/docker/x/cpu.cfs_period_us": "100000\n",
            },
            1.0,
        ),
        (
            V1,
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            V1,
            {
                "cpu/docker/x/cpu.cfs_quota_us": "-1\n",
                "cpu/docker/x/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        (V1, {"memory/docker/x/cpu.cfs_quota_us": "1\n"}, None),
        ("", {"cpu.max": "100000 100000\n"}, None),
    ],
)
def test_the_smallest_quota_above_the_process_counts(
    groups: str, files: Mapping[str, str], quota: float | None, tmp_path: Path
) -> None:
    assert cores.cpu_quota(system(tmp_path, groups, files)) == quota


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cores.cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "expected"),
    [(None, 4), (0.2, 1), (1.0, 1), (1.5, 2), (3.9, 4), (64.0, 4)],
    ids=str,
)
def test_part_of_a_core_counts_as_one_and_a_large_quota_as_all(
    quota: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_runtime, "physical_cores", lambda: 4)
    monkeypatch.setattr(cores, "cpu_quota", lambda: quota)
    assert cores.usable_cores() == expected
