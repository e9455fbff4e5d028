"""Density of the package's code: how much a reader meets in a line, and how often it is folded into an expression."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import esper

PACKAGE = Path(esper.__file__).parent
MAX_FILE_LINES = 500
MAX_TOKENS_A_LINE = 8.5
PER_THOUSAND = {
    "comprehensions": 25,
    "conditional expressions": 15,
    "attribute tuples": 0,
}
"""Max number in 1,000 lines of code."""
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
    tree = ast.parse(text)
    explained: set[int] = set()
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                explained.update(
                    range(node.lineno, (node.end_lineno or node.lineno) + 1)
                )
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                found["comprehensions"] += 1
            case ast.IfExp():
                found["conditional expressions"] += 1
            case ast.Assign(targets=[ast.Tuple(elts=targets), *_]):
                attributes = [
                    target for target in targets if isinstance(target, ast.Attribute)
                ]
                found["attribute tuples"] += len(attributes) > 1

    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT and token.start[0] not in explained:
            lines.add(token.start[0])
            found["tokens"] += 1
    found["lines"] = len(lines)
    return found


@cache
def of_package() -> Counter[str]:
    total: Counter[str] = Counter()
    for file in PACKAGE.rglob("*.py"):
        total += counted(file.read_text(encoding="utf-8"))
    return total


def test_a_line_has_few_tokens() -> None:
    total = of_package()
    assert total["tokens"] / total["lines"] <= MAX_TOKENS_A_LINE


@pytest.mark.parametrize("kind", PER_THOUSAND)
def test_few_lines_are_folded_into_expressions(kind: str) -> None:
    total = of_package()
    assert 1000 * total[kind] / total["lines"] <= PER_THOUSAND[kind]


def test_a_file_is_not_long() -> None:
    lengths = {
        file: len(file.read_text(encoding="utf-8").splitlines())
        for file in PACKAGE.rglob("*.py")
    }
    assert not {
        str(file): lines for file, lines in lengths.items() if lines > MAX_FILE_LINES
    }


def test_what_is_counted() -> None:
    text = '"""A module."""\n\n# a comment\nself.a, self.b = x, y\nc = [z for z in x] if x else 1\n'
    found = counted(text)
    assert found["lines"] == 2
    assert found["tokens"] == 11 + 13
    assert [found[kind] for kind in PER_THOUSAND] == [1, 1, 1]
