"""Rules that can be checked in the source: lengths, names, and first lines."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

import esper
from esper.config import TrainingConfig

PACKAGE = Path(esper.__file__).parent
TESTS = Path(__file__).parents[1]
LONGEST = 80


def functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


@pytest.mark.finding("M1")
def test_a_function_can_be_seen_at_once() -> None:
    lengths = {
        f"{file.relative_to(PACKAGE)}: {f.name}": (f.end_lineno or f.lineno)
        - f.lineno
        + 1
        for file, tree in modules()
        for f in functions(tree)
    }
    assert not {name: lines for name, lines in lengths.items() if lines > LONGEST}


@pytest.mark.finding("M1")
def test_what_a_stage_may_become_is_a_table() -> None:
    """No function compares a stage with three or more others in a chain of branches."""
    found = {
        (file.name, line) for file, tree in modules() for line in chains_of_stages(tree)
    }
    assert not found


SOURCES = [
    file
    for root in (PACKAGE, TESTS, TESTS.parent / "benchmarks")
    for file in sorted(root.rglob("*.py"))
]
QUESTION = re.compile(r"""["'](What|How|Why) """)


def test_a_first_line_is_a_sentence_or_a_noun_phrase() -> None:
    sources = {file: file.read_text(encoding="utf-8") for file in SOURCES}
    assert len(sources) > 500
    found = [
        f"{file.relative_to(TESTS.parent)}: {question}"
        for file, source in sources.items()
        if QUESTION.search(source)  # few have to be parsed
        for question in questions(ast.parse(source))
    ]
    assert found == []


def questions(tree: ast.AST) -> list[str]:
    """Texts that begin as an indirect question does."""
    texts = [node.value.value for node in ast.walk(tree) if is_text(node)]
    return [text for text in texts if text.startswith(("What ", "How ", "Why "))]


def test_a_first_line_that_is_a_question_is_seen() -> None:
    for source in (
        '"""What it is."""',
        "def f():\n    'How it is.'",
        'x = 1\n"Why it is."',
    ):
        assert QUESTION.search(source)
        assert questions(ast.parse(source))


def is_text(node: ast.AST) -> bool:
    """Whether a statement is a string by itself: a docstring, or that of an attribute."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


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
    return any(
        isinstance(part, ast.Attribute)
        and part.attr[0].isupper()
        and ast.unparse(part.value).split(".")[-1] in ("SeedStage", "S")
        for part in ast.walk(test)
    )


def test_a_chain_of_stages_is_seen() -> None:
    chain = (
        "if stage is SeedStage.TRAINING: a()\nelif stage is SeedStage.BLENDING: b()\n"
    )
    assert chains_of_stages(
        ast.parse(chain + "elif stage is SeedStage.HOLDING: c()\nelse: d()")
    ) == [1]
    assert chains_of_stages(ast.parse(chain + "else: d()")) == []


@cache
def modules() -> list[tuple[Path, ast.Module]]:
    """Every module of the package, parsed once."""
    return [
        (file, ast.parse(file.read_text(encoding="utf-8")))
        for file in sorted(PACKAGE.rglob("*.py"))
    ]


def imports_in_loops(tree: ast.AST) -> list[int]:
    """Lines of loops that import: by a statement, or by a call of a function that does."""
    loops = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.For | ast.AsyncFor | ast.While | ast.comprehension)
    ]
    return [
        inner.lineno
        for loop in loops
        for inner in ast.walk(loop)
        if isinstance(inner, ast.Import | ast.ImportFrom)
        or (
            isinstance(inner, ast.Call)
            and ast.unparse(inner.func).split(".")[-1]
            in ("__import__", "import_module")
        )
    ]


def looks_at_locals(tree: ast.AST) -> list[int]:
    """Lines that ask for the variables of a function or a frame."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id in ("locals", "globals"))
        or (
            isinstance(node, ast.Attribute)
            and node.attr in ("f_locals", "f_globals", "_getframe", "currentframe")
        )
        or (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "vars"
            and not node.args
        )
    ]


@pytest.mark.finding("M16")
def test_no_import_is_in_a_loop_and_nothing_asks_for_local_variables() -> None:
    found = [
        f"{file.relative_to(PACKAGE)}, line {line}"
        for file, tree in modules()
        for line in (*imports_in_loops(tree), *looks_at_locals(tree))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "for i in x:\n    import math",
        "while x:\n    def f():\n        from math import pi",
        "for i in x:\n    importlib.import_module(i)",
        "y = [z for z in __import__('math')]",
        "def f():\n    return locals()",
        "y = vars()",
        "y = sys._getframe(1).f_locals",
    ],
)
def test_an_import_in_a_loop_and_a_look_at_locals_are_seen(source: str) -> None:
    tree = ast.parse(source)
    assert imports_in_loops(tree) or looks_at_locals(tree)


DEVICE_WORD = re.compile(r"(cpu|cuda|mps|meta|xpu)(:\d*)?")


def devices_as_words(tree: ast.AST) -> list[str]:
    """Expressions that compare anything but the ``type`` of a device with the word for a device."""

    def word(node: ast.AST) -> bool:
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return any(word(each) for each in node.elts)
        return isinstance(node, ast.Constant) and bool(
            DEVICE_WORD.fullmatch(str(node.value))
        )

    def allowed(node: ast.AST) -> bool:
        return word(node) or (isinstance(node, ast.Attribute) and node.attr == "type")

    found: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(word(side) for side in sides) and not all(
                allowed(side) for side in sides
            ):
                found.append(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asks = node.func.attr in (
                "startswith",
                "endswith",
                "removeprefix",
                "find",
                "count",
                "index",
                "match",
            )
            if asks and any(word(argument) for argument in node.args):
                found.append(node)
        elif isinstance(node, ast.Match) and not allowed(node.subject):
            cases = [
                n
                for case in node.cases
                for n in ast.walk(case.pattern)
                if isinstance(n, ast.MatchValue)
            ]
            found += [case.value for case in cases if word(case.value)]
    return [ast.unparse(node) for node in found]


@pytest.mark.finding("M8")
def test_no_device_is_compared_with_a_string() -> None:
    """``device.type`` is a word; a device is a ``torch.device``, and "cuda" is not "cuda:0"."""
    found = {
        str(file.relative_to(PACKAGE)): words
        for file, tree in modules()
        if (words := devices_as_words(tree))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        'device == "cuda"',
        'x.device != "cpu"',
        'str(x.device) == "cuda:0"',
        'name.startswith("cuda")',
        'str(device).startswith(("cuda", "mps"))',
        '"cuda" in device',
        'device in ("cuda", "cpu")',
        'device not in {"meta"}',
        'match device:\n    case "cuda" | "mps":\n        pass',
        '"cpu" == where(x)',
    ],
)
def test_a_device_that_is_compared_with_a_string_is_seen(source: str) -> None:
    assert devices_as_words(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        'x.device.type == "cuda"',
        'device.type in ("cpu", "cuda")',
        'x.device == torch.device("cpu")',
        'x == "cudnn"',
    ],
)
def test_the_type_of_a_device_may_be_compared(source: str) -> None:
    assert devices_as_words(ast.parse(source)) == []


@pytest.mark.parametrize(
    "path", sorted((TESTS.parent / "csrc").rglob("*.*")), ids=lambda path: path.name
)
def test_compiled_modules_use_no_streams_of_cpp(path: Path) -> None:
    """Where a compiler links libstdc++ into each module, streams meet the locale of PyTorch's copy, and crash."""
    assert not re.search(
        r"#include <(iostream|fstream|sstream|iomanip|locale|regex)>|std::locale",
        path.read_text(),
    )


@pytest.mark.finding("M10")
def test_there_is_one_validator_of_slot_names() -> None:
    """All code that takes names of slots calls ``row_major``, which alone knows their form."""
    form = re.compile(r"r\S*\\d\S*c\S*\\d")
    patterns = {
        file.relative_to(PACKAGE).as_posix(): node.value
        for file, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and form.search(node.value)
    }
    assert list(patterns) == ["hosts/host.py"], patterns


@pytest.mark.finding("M13")
def test_no_one_reaches_into_the_counterfactuals() -> None:
    """Names of the helper's private parts occur in its own file only, under any name of the helper."""
    home = PACKAGE / "attribution" / "counterfactual.py"
    own = private_parts(ast.parse(home.read_text(encoding="utf-8")))
    assert own
    for file, tree in modules():
        if file != home:
            shared = private_parts(tree) & own
            read = [
                n
                for n in ast.walk(tree)
                if isinstance(n, ast.Attribute) and n.attr in own - shared
            ]
            assert not [f"{file}, line {node.lineno}" for node in read]


def private_parts(tree: ast.AST) -> set[str]:
    """Private methods, and private attributes of self."""
    methods = {f.name for f in functions(tree)}
    attributes = {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute)
        and isinstance(n.ctx, ast.Store)
        and ast.unparse(n.value) == "self"
    }
    return {
        name
        for name in methods | attributes
        if name.startswith("_") and not name.startswith("__")
    }


def documented(thing: object) -> set[str]:
    """Names with an entry among the arguments (``name: ...``), that the docstring quotes, or whose shape it gives."""
    text = inspect.getdoc(thing) or ""
    entries, quoted = (
        re.findall(r"^ +(\w+): \S", text, re.MULTILINE),
        re.findall(r"``(\w+)[^`]*``", text),
    )
    return {*entries, *quoted, *re.findall(r"(?=\b(\w+) (?:\w+ )?\[)", text)}


def undocumented(thing: object) -> list[str]:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(thing).parameters.values()  # type: ignore[arg-type]
    return [
        p.name
        for p in parameters
        if p.kind not in variable and p.name not in documented(thing)
    ]


@pytest.mark.finding("L9")
@pytest.mark.parametrize("name", esper.__all__)
def test_the_public_api_explains_every_parameter(name: str) -> None:
    thing = getattr(esper, name)
    assert inspect.getdoc(thing)
    if inspect.isfunction(thing) or name == "Experiment":
        assert undocumented(thing) == []
    for method in methods_of(thing) if inspect.isclass(thing) else ():
        assert inspect.getdoc(method), method
        assert undocumented(method) in ([], ["self"], ["cls"]), method


def methods_of(kind: type) -> list[object]:
    """The public methods that a class defines itself."""
    own = [
        getattr(method, "__func__", method)
        for name, method in vars(kind).items()
        if not name.startswith("_")
    ]
    return [method for method in own if inspect.isfunction(method)]


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("Of x and more.", ["x", "more"]),
        ("Of x.\n\nArgs:\n    x: a number.", ["more"]),
        ("Of x.\n\nArgs:\n    x: a number.\n    more: others.", []),
        ("``x``, with ``more``.", []),
        ("Of x.\n\nArgs:\n    x:\n    more: others.", ["x"]),
    ],
)
def test_a_parameter_without_an_entry_is_seen(text: str, missing: list[str]) -> None:
    def function(x: int, more: int = 0, **rest: int) -> None: ...

    function.__doc__ = text
    assert undocumented(function) == missing


def sections_of(kind: type[BaseModel]) -> list[type[BaseModel]]:
    """A section of the configuration and those within it."""
    inner = [field.annotation for field in kind.model_fields.values()]
    return [
        kind,
        *(
            s
            for i in inner
            if isinstance(i, type) and issubclass(i, BaseModel)
            for s in sections_of(i)
        ),
    ]


@pytest.mark.finding("L9")
def test_every_value_of_the_configuration_has_a_manual() -> None:
    sections = sections_of(TrainingConfig)
    assert len(sections) > 8
    silent = [
        f"{section.__name__}.{name}"
        for section in sections
        for name, field in section.model_fields.items()
        if not (
            isinstance(field.annotation, type)
            and issubclass(field.annotation, BaseModel)
        )
        and len((field.description or "").split()) < 2
    ]
    assert silent == []


def asserted_not_none(tree: ast.AST) -> list[int]:
    """Lines that assert that something is not None, which a type could say."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        and any(
            isinstance(part, ast.Compare) and ast.unparse(part).endswith(" is not None")
            for part in ast.walk(node.test)
        )
    ]


def test_types_say_what_cannot_be_none() -> None:
    found = [
        f"{file.relative_to(PACKAGE)}, line {line}"
        for file, tree in modules()
        for line in asserted_not_none(tree)
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "assert x is not None",
        "assert x.y is not None, 'text'",
        "assert a and b is not None",
    ],
)
def test_an_assertion_of_a_value_is_seen(source: str) -> None:
    assert asserted_not_none(ast.parse(source)) == [1]


MAX_CLASS_LINES, MAX_METHODS = 300, 20


def classes() -> list[tuple[str, ast.ClassDef]]:
    """Module and definition of every class."""
    return [
        (file.relative_to(PACKAGE).as_posix(), node)
        for file, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]


def test_a_class_can_be_read_at_once() -> None:
    large = {
        f"{file}:{node.name}"
        for file, node in classes()
        if (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_CLASS_LINES
        or sum(
            isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
            for inner in node.body
        )
        > MAX_METHODS
    }
    assert not large


def test_a_public_class_name_stands_for_one_class() -> None:
    counts = Counter(
        node.name for _, node in classes() if not node.name.startswith("_")
    )
    assert not {name for name, count in counts.items() if count > 1}
