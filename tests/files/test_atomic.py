"""Atomic writes: after a failure, old files are unchanged and no part remains."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from esper.files import atomic as files
from esper.files.atomic import write_atomic


@pytest.mark.parametrize("broken", ["write", "rename"])
def test_a_write_that_fails_leaves_the_old_file_and_no_part(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "a"
    write_atomic(file, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(
            *((os, "fsync", full) if broken == "write" else (Path, "replace", full))
        )
        with pytest.raises(OSError, match="No space left"):
            write_atomic(file, b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert file.read_bytes() == b"old"


def test_files_that_belong_together_are_both_old_or_both_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    files.write_together({one: b"1", other: b"1"})
    sync, synced = os.fsync, []

    def full(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*other'"):
        files.write_together({one: b"2", other: b"2"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "one": b"1",
        "other": b"1",
    }
