"""Density of the code: how much a reader meets in a line, and how often it is folded into an expression."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_TOKENS_A_LINE = {
    "esper": 8.5,
    "esper/cli": 8.4,
    "esper/files": 8.5,
    "tests": 9.0,
    "benchmarks": 9.0,
    "examples": 9.0,
}
PER_THOUSAND = {
    "esper": {"comprehensions": 25, "conditional expressions": 15},
    "esper/cli": {"comprehensions": 26, "conditional expressions": 15},
    "esper/files": {"comprehensions": 26, "conditional expressions": 15},
    "tests": {"comprehensions": 38, "conditional expressions": 8},
    "benchmarks": {"comprehensions": 48, "conditional expressions": 13},
    "examples": {"comprehensions": 30, "conditional expressions": 6},
}
"""Max number in 1,000 lines of code."""
MAX_IMPORT_SHARE = 0.078
"""Of the tokens of ``esper``."""
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def counted(text: str) -> Counter[str]:
    """Counts lines of code, without comments, docstrings and blank ones, their tokens, and folded expressions."""
    explained: set[int] = set()
    importing: set[int] = set()
    found: Counter[str] = Counter()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                explained.update(lines_of(node))
            case ast.Import() | ast.ImportFrom():
                importing.update(lines_of(node))
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                found["comprehensions"] += 1
            case ast.IfExp():
                found["conditional expressions"] += 1
            case ast.Assign(targets=[ast.Tuple(elts=targets), *_]):
                kinds = [type(target) for target in targets]
                found["attribute tuples"] += kinds.count(ast.Attribute) > 1

    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        if token.type not in LAYOUT and line not in explained:
            lines.add(line)
            found["tokens"] += 1
            found["tokens of imports"] += line in importing
    found["lines"] = len(lines)
    return found


def lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


@cache
def of_folder(folder: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for file in (ROOT / folder).rglob("*.py"):
        total += counted(file.read_text(encoding="utf-8"))
    return total


@pytest.mark.parametrize("folder", MAX_TOKENS_A_LINE)
def test_a_line_has_few_tokens(folder: str) -> None:
    total = of_folder(folder)
    assert total["tokens"] / total["lines"] <= MAX_TOKENS_A_LINE[folder]


@pytest.mark.parametrize("folder", PER_THOUSAND)
def test_few_lines_are_folded_into_expressions(folder: str) -> None:
    total = of_folder(folder)
    for kind, most in PER_THOUSAND[folder].items():
        assert 1000 * total[kind] / total["lines"] <= most, kind


def test_no_tuple_of_attributes_is_assigned_in_the_package() -> None:
    assert of_folder("esper")["attribute tuples"] == 0


def test_imports_are_a_small_share_of_the_package() -> None:
    total = of_folder("esper")
    assert total["tokens of imports"] / total["tokens"] <= MAX_IMPORT_SHARE


def test_what_is_counted() -> None:
    text = '"""A module."""\nimport os\n# a comment\nself.a, self.b = x, y\nc = [z for z in x] if x else 1\n'
    found = counted(text)
    assert found["lines"] == 3
    assert found["tokens"] == 2 + 11 + 13
    assert found["tokens of imports"] == 2
    for kind in ("comprehensions", "conditional expressions", "attribute tuples"):
        assert found[kind] == 1
