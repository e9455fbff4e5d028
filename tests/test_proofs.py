"""The pages of findings and traps: every row is there once, with a proof that exists, and no proof is forgotten."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"

FINDINGS = [
    *(f"C{i}" for i in range(1, 5)),
    *(f"H{i}" for i in range(1, 8)),
    *(f"M{i}" for i in range(1, 23)),
    *(f"L{i}" for i in range(1, 11)),
    "T1",
    "G1",
]
TRAPS = [str(i) for i in range(1, 43)]
PAGES = {"findings.md": FINDINGS, "traps.md": TRAPS}
EVERY = [(page, name) for page, names in PAGES.items() for name in names]


@cache
def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


@cache
def rows_of(page: str) -> dict[str, list[str]]:
    """Name of a row: its proofs, one cell for each time that the row is there."""
    found: dict[str, list[str]] = defaultdict(list)
    for table in re.findall(r"^\| row \|.*\n\|[-| ]*\n((?:\|.*\n)+)", text_of(page), re.MULTILINE):
        for line in table.splitlines():
            name, _what, proof = (cell.strip() for cell in line.strip("|").split(" | "))
            found[name].append(proof)
    return dict(found)


def proofs_in(text: str) -> list[tuple[str, str]]:
    """(file below tests/, name of the test) of each code span that names one; the id of a parameter is left out."""
    return re.findall(r"`([\w/]+\.py)::([\w*]+)(?:\[[^`]*\])?`", text)


def results_in(text: str) -> list[str]:
    return re.findall(r"benchmarks/results/[\w.]+\w", text)


@cache
def functions_of(file: str) -> tuple[str, ...]:
    """Tests of a file, read and not run."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return tuple(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))


@cache
def row_of(test: str) -> tuple[str, str] | None:
    """Page and row that a test is named after."""
    for page, pattern in (("findings.md", r"test_finding_([a-z]\d+)_"), ("traps.md", r"test_trap_(\d+)_")):
        if found := re.match(pattern, test):
            return page, found[1].upper().lstrip("0")
    return None


def named_after_rows() -> list[tuple[str, str, str, str]]:
    """Page, row, file and name of every test that is named after a row."""
    files = [path.relative_to(TESTS).as_posix() for path in sorted(TESTS.rglob("test_*.py"))]
    named = [(row_of(name), file, name) for file in files for name in functions_of(file)]
    return [(*row, file, name) for row, file, name in named if row]


@pytest.mark.parametrize("page", PAGES)
def test_every_row_is_there_once_and_in_order(page: str) -> None:
    rows = rows_of(page)
    assert list(rows) == PAGES[page]
    assert {name: len(cells) for name, cells in rows.items() if len(cells) != 1} == {}


@pytest.mark.parametrize(("page", "name"), EVERY, ids=[f"{page[:-4]} {name}" for page, name in EVERY])
def test_every_row_has_a_proof(page: str, name: str) -> None:
    (proof,) = rows_of(page)[name]
    assert proofs_in(proof) or results_in(proof)
    assert "PROOF-PENDING" not in proof


@pytest.mark.parametrize("page", PAGES)
def test_every_proof_exists(page: str) -> None:
    missing = [
        f"{file}::{name}"
        for file, name in proofs_in(text_of(page))
        if not (TESTS / file).is_file() or not any(fnmatchcase(test, name) for test in functions_of(file))
    ]
    missing += [path for path in results_in(text_of(page)) if not (ROOT / path).is_file()]
    assert missing == []
    spans = [span for span in re.findall(r"`[^`]+`", text_of(page)) if "::" in span]
    assert len(spans) == len(proofs_in(text_of(page))), "a span that is not read as a test"


def test_every_test_that_is_named_after_a_row_is_in_it() -> None:
    forgotten = [
        f"{page} {row}: {file}::{name}"
        for page, row, file, name in named_after_rows()
        if not any(
            file == told and fnmatchcase(name, pattern)
            for proof in rows_of(page).get(row, [])
            for told, pattern in proofs_in(proof)
        )
    ]
    assert forgotten == []


def test_a_star_stands_for_tests_of_the_row_it_is_in() -> None:
    for page, rows in ((page, rows_of(page)) for page in PAGES):
        prefix = {"findings.md": "test_finding_{}_", "traps.md": "test_trap_{:0>2}_"}[page]
        for name, proofs in rows.items():
            for _file, test in proofs_in(" ".join(proofs)):
                assert "*" not in test or test == prefix.format(name.lower()) + "*", f"{page} {name}: {test}"


def test_what_needs_a_gpu_says_so() -> None:
    """In its row; nobody takes a test that is skipped for a proof."""
    for page in PAGES:
        for line in text_of(page).splitlines():
            if "`cuda/" in line:
                assert "not run on a GPU yet" in line, line[:60]
