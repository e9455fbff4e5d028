"""`make results`: the commands of a page, and a recording that continues after an interrupt."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import record_results
from benchmarks.record_results import commands, pages, record


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the outputs; commands run in an empty folder."""
    monkeypatch.setattr(record_results, "ROOT", tmp_path)
    return tmp_path / "out"


def test_every_page_has_commands_that_can_be_run_as_they_stand() -> None:
    for page in pages([]):
        words = " ".join(commands(page)).split()
        assert words, page.name
        assert not {"TASK", "N", "PAGE.md"} & set(words), page.name


def test_a_command_over_two_lines_is_one_command(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n    esper compare --arm none \\\n        --arm random  # takes long\n\n    not a command\n"
    )
    assert commands(page) == ["esper compare --arm none --arm random"]


def test_a_command_that_succeeded_is_not_run_again_for_any_page(out: Path) -> None:
    for page in ("first", "first", "second"):
        assert record("echo run >> count", out / page)
    assert (out.parent / "count").read_text() == "run\n"


def test_a_command_that_failed_is_run_again_without_its_run_folder(out: Path) -> None:
    """A folder that was there before the first attempt stays: it is not one of the recording."""
    folder = out.parent / "runs" / "mine"
    folder.mkdir(parents=True)
    command = "test ! -e runs/mine # --out runs/mine"
    assert not record(command, out / "page")
    assert folder.is_dir()
    assert record(command, out / "page")
