"""A folder has one owner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import esper
from esper.files.claim import claimed, drop_if_empty, new_subfolder

OTHER = """
import sys
from pathlib import Path
import esper
from esper.files.claim import claimed
try:
    with claimed(Path(sys.argv[1])):
        print("claimed")
except esper.ConfigError as error:
    print(error)
"""


def other(folder: Path) -> str:
    """The answer that another process gets."""
    done = subprocess.run(
        [sys.executable, "-c", OTHER, str(folder)], capture_output=True, text=True
    )
    return done.stdout.strip() or done.stderr


def test_another_process_is_refused_until_the_owner_is_done(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "new"
    with claimed(folder):
        with claimed(folder):  # the same process goes on
            pass
        assert "belongs to a run in progress" in other(folder)
        assert list(folder.iterdir()) == [], "a claim leaves no file"
    assert other(folder) == "claimed"


def test_a_claim_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), claimed(tmp_path / "x"):
        _ = 1 / 0
    assert other(tmp_path / "x") == "claimed"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "x", tmp_path / ("x" * 300)):
        with (
            pytest.raises(esper.ConfigError, match="cannot be written"),
            claimed(folder),
        ):
            pass
        with pytest.raises(esper.ConfigError, match="cannot be written"):
            new_subfolder(folder.parent, folder.name)


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    made = [new_subfolder(tmp_path / "runs", "a").name for _ in range(3)]
    assert made == ["a", "a-2", "a-3"]


def test_only_empty_folders_are_dropped(tmp_path: Path) -> None:
    one, two = (
        new_subfolder(tmp_path / "runs", "a"),
        new_subfolder(tmp_path / "runs", "b"),
    )
    (two / "file").touch()
    for folder in (one, two, one):
        drop_if_empty(folder)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["b"]
    (two / "file").unlink()
    drop_if_empty(two)
    assert not (tmp_path / "runs").exists()
