"""`esper report` and `esper show`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from esper.show.charts import Picture
from tests.cli.conftest import Esper
from tests.recorded import Recorded
from tests.selection import slow_except


def test_show_prints_plain_lines_into_a_pipe(esper: Esper, recorded: Recorded) -> None:
    found = esper("show", str(recorded.run))
    assert found.code == 0
    assert "finished: 3 rounds played and compared" in found.out
    assert "\x1b" not in found.out
    assert not [line for line in found.out.splitlines() if line != line.rstrip()]


def test_report_writes_a_page_of_one_or_more_runs_and_says_where(
    esper: Esper, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = Picture(b"<svg></svg>", "")
    for module in ("charts", "life"):
        monkeypatch.setattr(f"esper.show.{module}.picture", lambda *_: empty)
    run = Path("first")
    shutil.copytree(recorded.run, run)
    found = esper("report", "first")
    assert found.code == 0
    assert found.out.startswith("first/report.html")
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert esper("report", "first", str(recorded.run), "--out", "mine.html").code == 0
    assert "2 runs: first, run" in Path("mine.html").read_text()


@pytest.mark.parametrize("command", ["report", "show"])
def test_a_folder_that_is_not_a_run_is_invalid_input(
    esper: Esper, recorded: Recorded, command: str
) -> None:
    found = esper(command, str(recorded.run.parent))
    assert found.code == 2
    assert "is not a run folder" in found.err
    assert str(recorded.run) in found.err
    assert esper(command).code == 2


def test_a_comparison_is_shown_by_its_tables_and_reported_with_its_pictures(
    esper: Esper, tmp_path: Path
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


@pytest.mark.parametrize("command", slow_except(["show"], ["show", "report"]))
def test_neither_imports_torch(
    command: str, recorded: Recorded, tmp_path: Path
) -> None:
    shutil.copytree(recorded.run, tmp_path / "r")
    script = (
        "import sys\nfrom esper.cli.group import group\n"
        f"group([{command!r}, {str(tmp_path / 'r')!r}], standalone_mode=False)\n"
        "print('heavy:', [name for name in ('torch', 'scipy', 'sklearn') if name in sys.modules])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert found.stdout.endswith("heavy: []\n")
