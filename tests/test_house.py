"""Rules of the house that can be read from the source: functions that can be seen at once, and what a name promises."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

import esper
from esper.config import TrainingConfig

PACKAGE = Path(esper.__file__).parent
LONGEST = 60


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


@pytest.mark.finding("M1")
@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_function_can_be_seen_at_once(path: Path) -> None:
    lengths = {f.name: (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions(ast.parse(path.read_text()))}
    assert not {name: lines for name, lines in lengths.items() if lines > LONGEST}


@pytest.mark.finding("M1")
def test_what_a_stage_may_become_is_a_table() -> None:
    """No module but the one with the table compares a stage with two or more others in a chain of branches."""
    for path in (PACKAGE / "env", PACKAGE / "seeds", PACKAGE / "training"):
        for file in path.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.If):
                    branches, tests = node, 0
                    while isinstance(branches, ast.If):
                        tests += "SeedStage." in ast.unparse(branches.test)
                        branches = branches.orelse[0] if len(branches.orelse) == 1 else None  # type: ignore[assignment]
                    assert tests < 3, f"{file}, line {node.lineno}"


@pytest.mark.finding("M16")
def test_no_function_of_the_package_asks_what_its_locals_are() -> None:
    for file in PACKAGE.rglob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}
        assert not names & {"locals", "globals"}, file


@pytest.mark.finding("M8")
def test_no_device_is_compared_with_a_string() -> None:
    """``device.type`` is a word; a device is a ``torch.device``, and "cuda" is not "cuda:0"."""
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                devices = [s for s in sides if re.search(r"\.device\)?$", ast.unparse(s))]
                words = [s for s in sides if isinstance(s, ast.Constant) and isinstance(s.value, str)]
                assert not (devices and words), f"{file}, line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.finding("M10")
def test_there_is_one_validator_of_slot_names() -> None:
    """Whoever takes names of slots calls ``row_major``; nothing else knows what a name looks like."""
    form = re.compile(r"r\S*\\d\S*c\S*\\d")
    patterns = {
        file.relative_to(PACKAGE).as_posix(): node.value
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and form.search(node.value)
    }
    assert list(patterns) == ["hosts/host.py"], patterns


@pytest.mark.finding("M13")
def test_no_one_reaches_into_the_counterfactuals() -> None:
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                assert not ast.unparse(node.value).endswith("counterfactual"), f"{file}, line {node.lineno}"


@pytest.mark.finding("L9")
@pytest.mark.parametrize("name", esper.__all__)
def test_the_public_api_explains_every_parameter(name: str) -> None:
    thing = getattr(esper, name)
    assert inspect.getdoc(thing)
    if inspect.isfunction(thing) or name == "Experiment":
        document = inspect.getdoc(thing) or ""
        parameters = [p for p in inspect.signature(thing).parameters if p not in ("args", "kwargs")]
        assert [p for p in parameters if p not in document] == []


@pytest.mark.finding("L9")
def test_every_value_of_the_configuration_has_a_manual() -> None:
    for section, field in TrainingConfig.model_fields.items():
        kind = field.annotation
        assert kind is not None
        for name, inner in kind.model_fields.items():  # type: ignore[attr-defined]
            assert inner.description or name == "gates" or hasattr(inner.annotation, "model_fields"), (
                f"{section}.{name}"
            )
