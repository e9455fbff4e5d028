"""`esper report` and `esper show`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.run.run_helpers import play, tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    play(tiny(), folder)
    return folder


def test_report_writes_a_page_and_says_where(
    esper: Any, run: Path, tmp_path: Path
) -> None:
    found = esper("report", str(run))
    assert found.code == 0
    assert found.out.startswith(str(run / "report.html"))
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert esper("report", str(run), "--out", "mine.html").code == 0
    assert (tmp_path / "mine.html").exists()


def test_a_report_of_several_runs_is_written_to_the_working_directory(
    esper: Any, run: Path, tmp_path: Path
) -> None:
    play(tiny(), tmp_path / "second")
    found = esper("report", str(run), "second")
    assert found.code == 0
    assert "2 runs: first, second" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("command", ["report", "show"])
def test_a_folder_that_is_not_a_run_is_invalid_input(
    esper: Any, run: Path, command: str
) -> None:
    found = esper(command, str(run.parent))
    assert found.code == 2
    assert "is not a run folder" in found.err
    assert str(run) in found.err
    assert esper(command).code == 2


def test_a_comparison_is_shown_by_its_tables_and_reported_with_its_pictures(
    esper: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "my comparison"
    folder.mkdir()
    (folder / "comparison.json").write_text("{}")
    for command in ("show", "report"):
        found = esper(command, str(folder))
        assert found.code == 2
        assert f"to continue it: esper compare --resume '{folder}'" in found.err
    (folder / "table.txt").write_text("arm  mean < 3\n")
    (folder / "pairs.svg").write_text("<svg/>")
    assert esper("show", str(folder)).out == "arm  mean < 3\n\n"
    assert esper("report", str(folder)).code == 0
    page = (folder / "report.html").read_text()
    assert "<pre>arm  mean &lt; 3</pre>" in page
    assert 'alt="pairs" src="data:image/svg+xml;base64,PHN2Zy8+"' in page
    assert 'alt="cost"' not in page
    found = esper("report", str(folder), str(tmp_path))
    assert found.code == 2
    assert f"is a comparison, not a run: esper report '{folder}'" in found.err


def test_neither_imports_torch(run: Path, tmp_path: Path) -> None:
    script = (
        "import sys\nfrom esper.cli.main import group\n"
        f"group(['show', {str(run)!r}], standalone_mode=False)\n"
        "print('show:', [name for name in ('torch', 'scipy', 'sklearn', 'matplotlib') if name in sys.modules])\n"
        f"group(['report', {str(run)!r}, '--out', {str(tmp_path / 'r.html')!r}], standalone_mode=False)\n"
        "print('report:', [name for name in ('torch', 'scipy', 'sklearn') if name in sys.modules])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "show: []\n" in found.stdout
    assert found.stdout.endswith("report: []\n")
