"""The rehearsal's own parts that need neither a CUDA build of torch nor much time."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.fault import Fault
from tests.rehearsal import record, steps
from tests.rehearsal.faults import FAULTS
from tests.rehearsal.workplace import ROOT

REPORT = """<testsuites><testsuite>
<testcase classname="tests.cuda.test_gpu_streams" name="test_a[x]"/>
<testcase classname="tests.cuda.test_gpu_streams" name="test_b"><failure message="wrong\nbits">...</failure></testcase>
<testcase classname="tests.cuda.test_gpu_streams" name="test_c"><skipped message="one GPU"/></testcase>
</testsuite></testsuites>"""


def result(name: str, status: int, tests: dict[str, str], log: Path) -> steps.Result:
    return steps.Result(name, status, 1.0, log, tests)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_changes_python_that_can_be_compiled(
    fault: Fault, tmp_path: Path
) -> None:
    copy = tmp_path / fault.file
    copy.parent.mkdir(parents=True)
    shutil.copy2(ROOT / fault.file, copy)
    fault.plant(tmp_path)
    assert copy.read_text() != (ROOT / fault.file).read_text()
    compile(copy.read_text(), str(copy), "exec")


def test_a_fault_that_does_not_fit_its_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("a = 1\na = 1\n")
    for old in ("a = 1", "b = 1"):
        with pytest.raises(ValueError, match=r"file.py must have this once"):
            Fault("", "file.py", old, "", "").plant(tmp_path)


def test_a_step_that_hangs_is_stopped_and_says_where_it_was(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import time; print('begun', flush=True); time.sleep(60)"
    found = steps.run(
        "hang",
        [sys.executable, "-c", code],
        folder=tmp_path,
        log=log,
        limit=2,
        environment={},
    )
    assert found.status == steps.TIMED_OUT
    assert not found.passed
    assert "begun" in log.read_text()
    assert found.last_line == "KeyboardInterrupt"


def test_outcomes_are_read_by_test(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    tests = steps.outcomes(report)
    assert tests == {
        "test_gpu_streams.py::test_a[x]": "passed",
        "test_gpu_streams.py::test_b": "failed: wrong bits",
        "test_gpu_streams.py::test_c": "skipped: one GPU",
    }
    found = result("lanes", 1, tests, tmp_path)
    assert found.failed == ["test_gpu_streams.py::test_b"]
    assert found.skipped == {"test_gpu_streams.py::test_c": "one GPU"}
    assert steps.outcomes(tmp_path / "none.xml") == {}


def test_the_record_names_what_did_not_pass_and_faults_that_nobody_noticed(
    tmp_path: Path,
) -> None:
    tests = {"t.py::a": "passed", "t.py::b": "skipped: one GPU"}
    good, bad = (
        result("lanes", 0, tests, tmp_path),
        result("lanes", 1, {"t.py::c": "failed: wrong"}, tmp_path),
    )
    noticed, crashed = (
        result("fault: one", 1, {"t.py::c": "failed: x"}, tmp_path),
        result("fault: two", 4, {}, tmp_path),
    )
    whole = record.Rehearsal("2.11.0", "3.12", [1, 2], [good], [], [noticed], 5.0)
    assert whole.passed
    assert not record.Rehearsal("2.11.0", "3.12", [1], [bad], [], [], 5.0).passed
    assert not record.Rehearsal(
        "2.11.0", "3.12", [1], [good], [], [crashed], 5.0
    ).passed
    page = record.written(
        [
            record.Rehearsal(
                "2.11.0", "3.12", [1, 2], [good, bad], [], [noticed, crashed], 5.0
            )
        ],
        9.0,
        "a command",
    )
    for line in (
        "| lanes | 1 passed, 0 failed, 1 skipped | 1 |",
        "- `t.py::b`: skipped: one GPU",
        "- `t.py::c`: failed: wrong",
        "| one | `t.py::c` | 1 |",
        "| two | NOBODY (status 4) | 1 |",
    ):
        assert line in page.splitlines()
    assert "No GPU took part" in page
