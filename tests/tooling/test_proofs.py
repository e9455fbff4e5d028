"""The pages of findings and traps: every row is there once, with a proof that exists, and no proof is forgotten."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
    for table in re.findall(
        r"^\| row \|.*\n\|[-| ]*\n((?:\|.*\n)+)", text_of(page), re.MULTILINE
    ):
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
def marks_of(file: str) -> dict[str, set[tuple[str, str]]]:
    """Name of each test in a file, read and not run: the (page, row) pairs that it is marked with."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {
        node.name: {
            row for decorator in node.decorator_list if (row := row_in(decorator))
        }
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def row_in(decorator: ast.expr) -> tuple[str, str] | None:
    """Page and row of `@pytest.mark.finding("C1")` or `@pytest.mark.trap(7)`; None for any other decorator."""
    match decorator:
        case ast.Call(
            func=ast.Attribute(attr="finding"), args=[ast.Constant(value=str(row))]
        ):
            return "findings.md", row
        case ast.Call(
            func=ast.Attribute(attr="trap"), args=[ast.Constant(value=int(row))]
        ):
            return "traps.md", str(row)
    return None


def marked() -> list[tuple[str, str, str, str]]:
    """Page, row, file and name of every test that is marked with a row."""
    files = [
        path.relative_to(TESTS).as_posix() for path in sorted(TESTS.rglob("test_*.py"))
    ]
    return [
        (*row, file, name)
        for file in files
        for name, rows in marks_of(file).items()
        for row in sorted(rows)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_row_is_there_once_and_in_order(page: str) -> None:
    rows = rows_of(page)
    assert list(rows) == PAGES[page]
    assert {name: len(cells) for name, cells in rows.items() if len(cells) != 1} == {}


@pytest.mark.parametrize(
    ("page", "name"), EVERY, ids=[f"{page[:-4]} {name}" for page, name in EVERY]
)
def test_every_row_has_a_proof(page: str, name: str) -> None:
    (proof,) = rows_of(page)[name]
    assert proofs_in(proof) or results_in(proof)
    assert "PROOF-PENDING" not in proof


@pytest.mark.parametrize("page", PAGES)
def test_every_proof_exists(page: str) -> None:
    missing = [
        f"{file}::{name}"
        for file, name in proofs_in(text_of(page))
        if not (TESTS / file).is_file() or (name != "*" and name not in marks_of(file))
    ]
    missing += [
        path for path in results_in(text_of(page)) if not (ROOT / path).is_file()
    ]
    assert missing == []
    spans = [span for span in re.findall(r"`[^`]+`", text_of(page)) if "::" in span]
    assert len(spans) == len(proofs_in(text_of(page))), (
        "a span that is not read as a test"
    )


def test_every_test_that_is_marked_with_a_row_is_in_it() -> None:
    forgotten = [
        f"{page} {row}: {file}::{name}"
        for page, row, file, name in marked()
        if not {(file, name), (file, "*")}
        & set(proofs_in(" ".join(rows_of(page).get(row, []))))
    ]
    assert forgotten == []


def test_a_star_stands_for_tests_of_the_row_it_is_in() -> None:
    rows = [
        (page, row, proof)
        for page in PAGES
        for row, cells in rows_of(page).items()
        for proof in cells
    ]
    empty = [
        f"{page} {row}: {file}::*"
        for page, row, proof in rows
        for file, name in proofs_in(proof)
        if name == "*" and (page, row, file) not in {entry[:3] for entry in marked()}
    ]
    assert empty == []
    assert sum(text_of(page).count("::*`") for page in PAGES) == sum(
        proof.count("::*`") for *_, proof in rows
    )


def test_a_test_that_needs_a_gpu_says_how_far_it_has_run() -> None:
    """A test that is skipped without a GPU is no proof by itself."""
    known = (
        "emulated, not on a GPU yet",
        "rehearsed, not on a GPU yet",
        "not run yet",
        "ran on an H100",
        "ran on an H200",
    )
    silent = [
        part
        for page in PAGES
        for line in text_of(page).splitlines()
        if line.startswith("|")
        for part in line.strip("| ").split(";")
        if "`cuda/" in part and not part.strip().endswith(known)
    ]
    assert silent == []
