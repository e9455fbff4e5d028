"""The table of proven properties agrees with the marks of the tests."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "dev" / "proofs.md"
ROWS = [
    *(f"C{i}" for i in range(1, 5)),
    *(f"H{i}" for i in range(1, 8)),
    *(f"M{i}" for i in range(1, 23)),
    *(f"L{i}" for i in range(1, 11)),
    "T1",
    "G1",
    *(str(i) for i in range(1, 43)),
]


@cache
def table() -> list[list[str]]:
    """Cells of the table of rows: name, what holds, how far it ran on a GPU."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## ")[0]
    lines = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines[2:]]


@cache
def marked() -> dict[str, set[str]]:
    """Names of rows, and the folders of the tests that are marked with each."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                for decorator in node.decorator_list:
                    if row := row_in(decorator):
                        found[row].add(file.relative_to(TESTS).parts[0])
    return dict(found)


def row_in(decorator: ast.expr) -> str | None:
    """The row in ``pytest.mark.finding("C1")`` or ``pytest.mark.trap(7)``."""
    match decorator:
        case ast.Call(
            func=ast.Attribute(attr="finding" | "trap"), args=[ast.Constant(value=row)]
        ):
            return str(row)
    return None


def test_every_row_is_there_once_and_in_order() -> None:
    assert [row for row, _, _ in table()] == ROWS


def test_every_row_has_tests_and_every_mark_a_row() -> None:
    assert set(marked()) == set(ROWS)


def test_rows_with_tests_on_a_gpu_say_how_far_they_have_run() -> None:
    told = {row for row, _, gpu in table() if gpu}
    assert told == {row for row, folders in marked().items() if "cuda" in folders}


@pytest.mark.parametrize(
    ("source", "row"),
    [
        ('pytest.mark.finding("C1")', "C1"),
        ("pytest.mark.trap(7)", "7"),
        ("pytest.mark.slow", None),
    ],
)
def test_a_mark_is_read(source: str, row: str | None) -> None:
    assert row_in(ast.parse(source, mode="eval").body) == row
