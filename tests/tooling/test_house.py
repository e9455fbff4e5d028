"""Rules that can be checked in the source: lengths, names, and documentation."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

import esper
from esper.config import TrainingConfig

PACKAGE = Path(esper.__file__).parent
ROOT = PACKAGE.parent
MAX_FUNCTION_LINES, MAX_CLASS_LINES, MAX_METHODS = 80, 300, 20
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> list[tuple[str, ast.Module]]:
    """Path and tree of every module of the package, parsed once."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found.append((file.relative_to(PACKAGE).as_posix(), tree))
    return found


def nodes(kind: type | object) -> Iterator[tuple[str, ast.AST]]:
    """Path of the module and node, for every node of a kind in the package."""
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, kind):  # type: ignore[arg-type]
                yield name, node


def places(check: Callable[[ast.AST], list[int]]) -> list[str]:
    """Modules and lines that ``check`` returns for the trees of the package."""
    return [f"{name}:{line}" for name, tree in modules() for line in check(tree)]


def length(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1  # type: ignore[attr-defined]


@pytest.mark.finding("M1")
def test_a_function_can_be_seen_at_once() -> None:
    for name, node in nodes(FUNCTION):
        assert length(node) <= MAX_FUNCTION_LINES, f"{name}: {node.name}"  # type: ignore[attr-defined]


def test_a_class_can_be_read_at_once() -> None:
    for name, node in nodes(ast.ClassDef):
        assert isinstance(node, ast.ClassDef)
        methods = sum(isinstance(inner, FUNCTION) for inner in node.body)
        assert length(node) <= MAX_CLASS_LINES, f"{name}: {node.name}"
        assert methods <= MAX_METHODS, f"{name}: {node.name}"


def test_a_public_class_name_stands_for_one_class() -> None:
    names = Counter(node.name for _, node in nodes(ast.ClassDef))  # type: ignore[attr-defined]
    double = {name for name, count in names.items() if count > 1}
    assert {name for name in double if not name.startswith("_")} == set()


QUESTION = re.compile(r"""["'](What|How|Why) """)


def test_a_first_line_is_a_sentence_or_a_noun_phrase() -> None:
    found = []
    for folder in ("esper", "tests", "benchmarks"):
        for file in (ROOT / folder).rglob("*.py"):
            source = file.read_text(encoding="utf-8")
            if QUESTION.search(source):  # few have to be parsed
                found += questions(ast.parse(source))
    assert found == []


def questions(tree: ast.AST) -> list[str]:
    """Texts by themselves, such as docstrings, that begin as an indirect question does."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                if text.startswith(("What ", "How ", "Why ")):
                    found.append(text)
    return found


@pytest.mark.finding("M1")
def test_what_a_stage_may_become_is_a_table() -> None:
    """No function compares a stage with three or more others in a chain of branches."""
    assert places(chains_of_stages) == []


def chains_of_stages(tree: ast.AST) -> list[int]:
    """Lines of chains of branches, three or more of which name a stage."""
    lines = []
    for node in ast.walk(tree):
        tests, branch = 0, node
        while isinstance(branch, ast.If):
            tests += names_a_stage(branch.test)
            branch = branch.orelse[0] if len(branch.orelse) == 1 else ast.Pass()
        if tests >= 3:
            lines.append(node.lineno)  # type: ignore[attr-defined]
    return lines


def names_a_stage(test: ast.expr) -> bool:
    text = ast.unparse(test)
    return bool(re.search(r"\b(SeedStage|S)\.[A-Z]", text))


def imports_in_loops(tree: ast.AST) -> list[int]:
    """Lines of loops that import: by a statement, or by a call of a function that does."""
    lines = []
    for loop in ast.walk(tree):
        if not isinstance(loop, ast.For | ast.AsyncFor | ast.While | ast.comprehension):
            continue
        for inner in ast.walk(loop):
            match inner:
                case ast.Import() | ast.ImportFrom():
                    lines.append(inner.lineno)
                case ast.Call(func=function):
                    name = ast.unparse(function).split(".")[-1]
                    if name in ("__import__", "import_module"):
                        lines.append(inner.lineno)
    return lines


def looks_at_locals(tree: ast.AST) -> list[int]:
    """Lines that ask for the variables of a function or a frame."""
    lines = []
    for node in ast.walk(tree):
        match node:
            case ast.Name(id="locals" | "globals"):
                lines.append(node.lineno)
            case ast.Attribute(
                attr="f_locals" | "f_globals" | "_getframe" | "currentframe"
            ):
                lines.append(node.lineno)
            case ast.Call(func=ast.Name(id="vars"), args=[]):
                lines.append(node.lineno)
    return lines


@pytest.mark.finding("M16")
def test_no_import_is_in_a_loop_and_nothing_asks_for_local_variables() -> None:
    assert places(imports_in_loops) == []
    assert places(looks_at_locals) == []


DEVICE_WORD = re.compile(r"(cpu|cuda|mps|meta|xpu)(:\d*)?")
ASKS = (
    "startswith",
    "endswith",
    "removeprefix",
    "find",
    "count",
    "index",
    "match",
)


def devices_as_words(tree: ast.AST) -> list[int]:
    """Lines that compare anything but the ``type`` of a device with the word for a device."""
    lines: list[int] = []
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                sides = [left, *others]
                wrong = any(map(is_word, sides)) and not all(map(may_be_word, sides))
            case ast.Call(func=ast.Attribute(attr=name), args=arguments):
                wrong = name in ASKS and any(map(is_word, arguments))
            case ast.Match(subject=subject, cases=cases):
                wrong = not may_be_word(subject) and any(map(names_a_device, cases))
            case _:
                continue
        if wrong:
            lines.append(node.lineno)
    return lines


def is_word(node: ast.AST) -> bool:
    """Whether a node is the word for a device, or a collection with one."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(is_word, node.elts))
    if not isinstance(node, ast.Constant):
        return False
    return bool(DEVICE_WORD.fullmatch(str(node.value)))


def may_be_word(node: ast.AST) -> bool:
    """Whether a node is such a word, or the type of a device."""
    return is_word(node) or (isinstance(node, ast.Attribute) and node.attr == "type")


def names_a_device(case: ast.match_case) -> bool:
    values = [
        node for node in ast.walk(case.pattern) if isinstance(node, ast.MatchValue)
    ]
    return any(is_word(node.value) for node in values)


@pytest.mark.finding("M8")
def test_no_device_is_compared_with_a_string() -> None:
    """``device.type`` is a word; a device is a ``torch.device``, and "cuda" is not "cuda:0"."""
    assert places(devices_as_words) == []


STREAMS = r"#include <(iostream|fstream|sstream|iomanip|locale|regex)>|std::locale"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "csrc").rglob("*.*")), ids=lambda path: path.name
)
def test_compiled_modules_use_no_streams_of_cpp(path: Path) -> None:
    """Where a compiler links libstdc++ into each module, streams meet the locale of PyTorch's copy, and crash."""
    assert not re.search(STREAMS, path.read_text())


@pytest.mark.finding("M10")
def test_there_is_one_validator_of_slot_names() -> None:
    """All code that takes names of slots calls ``row_major``, which alone knows their form."""
    form = re.compile(r"r\S*\\d\S*c\S*\\d")
    patterns = set()
    for name, node in nodes(ast.Constant):
        value = node.value  # type: ignore[attr-defined]
        if isinstance(value, str) and form.search(value):
            patterns.add(name)
    (only,) = patterns
    assert only.endswith("hosts/host.py")


@pytest.mark.finding("M13")
def test_no_one_reaches_into_the_counterfactuals() -> None:
    """Names of the helper's private parts occur in its own file only, under any name of the helper."""
    (home,) = (name for name, _ in modules() if name.endswith("/counterfactual.py"))
    own = private_parts(dict(modules())[home])
    assert own
    for name, tree in modules():
        foreign = own - private_parts(tree)
        for node in ast.walk(tree):
            if name != home and isinstance(node, ast.Attribute):
                assert node.attr not in foreign, f"{name}:{node.lineno}"


def private_parts(tree: ast.AST) -> set[str]:
    """Private methods, and private attributes of self."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name):
                names.add(name)
            case ast.Attribute(attr=name, value=ast.Name(id="self"), ctx=ast.Store()):
                names.add(name)
    return {name for name in names if re.match(r"_[^_]", name)}


def documented(thing: object) -> set[str]:
    """Names with an entry among the arguments (``name: ...``), that the docstring quotes, or whose shape it gives."""
    text = inspect.getdoc(thing) or ""
    entries = re.findall(r"^ +(\w+): \S", text, re.MULTILINE)
    quoted = re.findall(r"``(\w+)[^`]*``", text)
    return {*entries, *quoted, *re.findall(r"(?=\b(\w+) (?:\w+ )?\[)", text)}


def undocumented(thing: object) -> list[str]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(thing).parameters.values()  # type: ignore[arg-type]
    names = [each.name for each in parameters if each.kind not in variable]
    return sorted({*names} - documented(thing), key=names.index)


@pytest.mark.finding("L9")
@pytest.mark.parametrize("name", esper.__all__)
def test_the_public_api_explains_every_parameter(name: str) -> None:
    thing = getattr(esper, name)
    assert inspect.getdoc(thing)
    if inspect.isfunction(thing) or name == "Experiment":
        assert undocumented(thing) == []
    if not inspect.isclass(thing):
        return
    for member, value in vars(thing).items():
        method = getattr(value, "__func__", value)
        if not member.startswith("_") and inspect.isfunction(method):
            assert inspect.getdoc(method), method
            assert undocumented(method) in ([], ["self"], ["cls"]), method


def silent(section: type[BaseModel]) -> Iterator[str]:
    """Values of a section, and of those within it, that have no manual."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from silent(kind)
        elif len((field.description or "").split()) < 2:
            yield f"{section.__name__}.{name}"


@pytest.mark.finding("L9")
def test_every_value_of_the_configuration_has_a_manual() -> None:
    assert len(TrainingConfig.model_fields) > 8
    assert list(silent(TrainingConfig)) == []


def asserted_not_none(tree: ast.AST) -> list[int]:
    """Lines that assert that something is not None, which a type could say."""
    asserts = [node for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    return [a.lineno for a in asserts if "is not None" in ast.unparse(a.test)]


def test_types_say_what_cannot_be_none() -> None:
    assert places(asserted_not_none) == []
