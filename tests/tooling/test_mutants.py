"""The table of mutants fits the sources, and the tool tells those that are noticed from those that survive."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.fault import Fault
from tests.mutants import mutate
from tests.mutants.table import MUTANTS
from tests.tooling.test_proofs import ROWS as PROVEN

ROOT = Path(__file__).resolve().parents[2]
ROWS = [f"trap {row}" if row.isdigit() else row for row in PROVEN]
SUBJECTS = (
    "contracts",
    "growing in a loop",
    "own loops",
    "sources",
    "joining",
    "operations",
    "warnings",
    "other people's networks",
    "layouts",
    "exports",
    "several decisions",
    "merges in training",
    "shrink",
    "runs and comparisons",
    "numbers",
    "compiled steps",
    "ranks",
    "ranks and wider layers",
    "hosts that start from trained ones",
    "wider at once",
    "the tuned baseline",
    "tapes",
)
EVERY = [(row, fault) for row, faults in MUTANTS.items() for fault in faults]


@pytest.mark.parametrize(
    ("row", "fault"), EVERY, ids=[f"{row}-{fault.name}" for row, fault in EVERY]
)
def test_a_mutant_fits_its_file_and_names_a_test(
    row: str, fault: Fault, tmp_path: Path
) -> None:
    copy = tmp_path / fault.file
    copy.parent.mkdir(parents=True)
    shutil.copy2(ROOT / fault.file, copy)
    fault.plant(tmp_path)
    assert copy.read_text() != (ROOT / fault.file).read_text()
    if copy.suffix == ".py":
        compile(copy.read_text(), str(copy), "exec")
    file, test = fault.tests.split("::")
    name = re.escape(test.split("[")[0])
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), (
        fault.tests
    )


def test_every_row_has_a_mutant_and_every_other_subject_is_known() -> None:
    assert [row for row in ROWS if row not in MUTANTS] == []
    assert [row for row in MUTANTS if row not in ROWS and row not in SUBJECTS] == []


def test_in_the_course_of_days_every_mutant_is_tried() -> None:
    tried = [
        fault for day in range(len(EVERY)) for _, fault in mutate.choose(None, 4, day)
    ]
    assert {id(fault) for fault in tried} == {id(fault) for _, fault in EVERY}


def test_a_row_without_mutants_is_an_error_that_lists_the_rows() -> None:
    with pytest.raises(
        SystemExit, match=r"no mutant belongs to C99; rows with mutants: .*trap 36"
    ):
        mutate.choose(["C99"], None)


@pytest.mark.parametrize(
    ("new", "result"),
    [
        ("1", mutate.SURVIVED),
        ("2", mutate.NOTICED),
        ("os._exit(9)", mutate.BROKEN),
        ("os.abort()", mutate.NOTICED),
    ],
)
def test_a_mutant_is_noticed_if_its_test_fails_or_dies(
    new: str, result: str, tmp_path: Path
) -> None:
    (tmp_path / "it.py").write_text("import os\ndef f():\n    return 1  # here\n")
    (tmp_path / "test_it.py").write_text(
        "import it\ndef test_f():\n    assert it.f() == 1\n"
    )
    fault = Fault(
        "", "it.py", "return 1  # here", f"return {new}", "test_it.py::test_f"
    )
    assert mutate.tried(fault, tmp_path).split(":")[0] == result
    assert "return 1  # here" in (tmp_path / "it.py").read_text()
