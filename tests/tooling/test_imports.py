"""Guard rails of the tree: imports point one way, and files stay short.

Read from the source by `ast`: nothing of Esper is imported, so this runs before anything is built.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "esper"
MAX_LINES = {"esper": 500, "csrc": 500, "tests": 600}  # lines of tests are shorter
SOURCE_SUFFIXES = {".py", ".cpp", ".cu", ".cuh", ".h"}

# What every module but these themselves may import.
COMMON = (
    "ops",
    "errors",
    "config.files",
    "agents.spec",
    "config",
    "config.resolved",
    "telemetry.event",
    "telemetry.html",
    "telemetry.score",
    "telemetry.span",
    "telemetry.timer",
    "_runtime",
)

# Row: what the package may import, besides itself and COMMON. A row names only rows above it, so there are no cycles.
# A dotted name is that one module; "root" is `import esper` itself.
ALLOWED: dict[str, tuple[str, ...]] = {
    # leaves
    "_runtime": (),
    "ops": (),
    "errors": (),
    "config.files": ("errors",),
    "agents.spec": ("errors",),
    "config.types": (),
    "config.task": ("config.types",),
    "config.telemetry": ("config.types",),
    "config.controllers": ("config.types",),
    "config": ("errors", "agents.spec"),
    "telemetry.text": (),
    "telemetry.event": (),
    "telemetry.score": ("telemetry.text",),
    "telemetry.span": (),
    "telemetry.timer": (),
    "telemetry": (),
    # the seam: both sides import it
    "core.arrays": (),
    "core.stage": (),
    "core.sizing": (),
    "core.action": ("core.arrays",),
    "core.mask": ("core.action", "core.arrays"),
    "core.observation": ("core.action", "core.arrays", "core.stage"),
    # what growing is, in arrays and modules
    "core": (),
    # what trains a host
    "hosts": ("core",),
    "data": ("core", "hosts"),
    # files of weights, which hosts may start from
    "files.atomic": ("telemetry.text",),
    "training": ("core", "hosts", "data", "files.atomic", "config.task"),
    "files.grown_host": ("core", "hosts", "data", "training", "files.atomic"),
    # hosts that differ
    "exam": ("core", "hosts", "data"),
    # the env
    "env": (
        "core",
        "hosts",
        "data",
        "training",
        "config.task",
        "files.grown_host",
        "exam",
    ),
    # what decides: it knows the seam, never the env or what trains a host
    "agents": (
        "core.action",
        "core.arrays",
        "core.mask",
        "core.observation",
        "core.sizing",
        "core.stage",
    ),
}
LIBRARY = tuple(ALLOWED)
# runs, and what is made of them
ALLOWED["files"] = (*LIBRARY, "root")
ALLOWED["show"] = (*LIBRARY, "files")
# a controller by its name, which may be a saved agent or a user's file
ALLOWED["agents.make"] = (*LIBRARY, "files")
# rounds of hosts, which comparisons play, too
ALLOWED["run.interrupt"] = ()
ALLOWED["run.rollout"] = (*LIBRARY, "files", "run.interrupt")
PLAY = ("run.interrupt", "run.rollout")
ALLOWED["grower"] = (*LIBRARY, "files", "show")
ALLOWED["integrations"] = (*LIBRARY, "files", "grower")
ALLOWED["compare"] = (*LIBRARY, "show", "files", *PLAY, "root")
ALLOWED["run"] = (*LIBRARY, "files", "show", *PLAY, "compare", "root")
# comparisons whose arms may be runs of their own
ALLOWED["compare.comparison_run"] = (*LIBRARY, "files", "compare", "run")
ALLOWED["compare.evaluate"] = (*LIBRARY, "files", "compare", "run")
ROOMS = ("files", "show", "grower", "integrations", "compare", "run")
ALLOWED["cli"] = (*LIBRARY, *ROOMS, "root")
ALLOWED["bench"] = (*LIBRARY, *ROOMS, "root")
ALLOWED["root"] = (*LIBRARY, *ROOMS)
ALLOWED["__main__"] = ("cli", "root")


def covers(name: str, module: str) -> bool:
    return module == name or module.startswith(name + ".")


def row_of(module: str) -> str | None:
    """The most specific row for a module, given without the leading ``esper.``; None without a row."""
    rows = [row for row in ALLOWED if covers(row, module)]
    return max(rows, key=len, default=None)


def module_of(path: Path) -> str:
    """``esper/core/site.py`` is ``seeds.site``, ``seeds/__init__.py`` is ``seeds``, and `esper` itself ``root``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "root"


def imported(tree: ast.AST, package: tuple[str, ...]) -> list[tuple[int, str]]:
    """(line, module without ``esper.``) of every import of Esper, lazy ones in functions too.

    ``package`` is where relative imports start: ("esper", "seeds") for a module of `esper.core`.
    """
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *(node.module.split(".") if node.module else ())))
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return [
        (line, without_prefix(name)) for line, name in found if covers("esper", name)
    ]


def without_prefix(name: str) -> str:
    """``esper.core.stage`` is ``core.stage``; ``esper``, or a name in it that has no row, is the root."""
    inner = name.removeprefix("esper").removeprefix(".")
    return inner if row_of(inner) else "root"


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Returns the wrong imports of one module."""
    row = row_of(module)
    if row is None:
        return [f"{module}: no row in ALLOWED, say there what it may import"]
    may = (row, *ALLOWED[row], *(() if row in COMMON else COMMON))
    here = () if module == "root" else tuple(module.split("."))
    package = ("esper", *(here if is_package else here[:-1]))
    return [
        f"{module}:{line} imports {target}; {row} may import {', '.join(may)}"
        for line, target in imported(ast.parse(source), package)
        if not any(covers(name, target) for name in may)
    ]


def test_imports_point_one_way() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert files
    wrong = [
        line
        for path in files
        for line in violations(
            module_of(path),
            path.read_text(encoding="utf-8"),
            is_package=path.stem == "__init__",
        )
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_no_file_imports_what_imports_it() -> None:
    """Lazy imports count; the root, whose names are loaded when they are first used, does not."""
    paths = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    graph = {
        module: file_imports(path, paths)
        for module, path in paths.items()
        if module != "root"
    }
    graphlib.TopologicalSorter(
        graph
    ).prepare()  # raises CycleError, which names the files
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph | {"data.split": {"data.task"}}).prepare()


def file_imports(
    path: Path, modules: Collection[str], *, lazy: bool = True
) -> set[str]:
    """Returns the modules that a file imports, without imports for type checkers and from itself.

    ``lazy``: whether those count that a function makes when it is called.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        for_types = (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        if for_types or (isinstance(node, ast.FunctionDef) and not lazy):
            node.body = []
    module = module_of(path)
    package = ("esper", *module.split(".")[: None if path.stem == "__init__" else -1])
    targets = [target for _, target in imported(tree, package)]
    files = {
        max((each for each in modules if covers(each, target)), key=len, default="root")
        for target in targets
    }
    return files - {module, "root"}  # compiled modules have no file here


GROWER_FILES = 93
"""Files that `esper.Grower` may load, packages not counted: a model that grows in its own loop needs no run."""

NOT_IN_GROWER = (
    *(
        "agents.ppo",
        "bench",
        "cli",
        "compare",
        "files",
        "integrations",
        "run",
        "show",
    ),
    *("telemetry.hub", "telemetry.sinks"),
    *(
        "data.split",
        "data.task",
        "data.tasks",
        "env.make",
        "env.training_backend",
        "env.vector_env",
    ),
    *("grower.log", "training.execution", "training.executor"),
    *(
        "training.host_state",
        "training.host_trainer",
        "training.host_training",
        "training.step",
        "training.validate",
    ),
)
"""Rooms and modules that it may not load."""


def test_what_a_grower_loads_knows_nothing_of_runs() -> None:
    loaded = closure("grower.grower")
    strangers = [
        module
        for module in loaded
        if any(covers(room, module) for room in NOT_IN_GROWER)
    ]
    assert strangers == []
    files = [
        module for module in loaded if not (PACKAGE / module.replace(".", "/")).is_dir()
    ]
    assert len(files) <= GROWER_FILES
    assert {"env.slot_env", "grower.sites", "core.site"} <= set(files)


def closure(root: str) -> list[str]:
    """Returns the modules that are loaded with a module, itself and the packages included, in order."""
    paths = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    loaded: set[str] = set()
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module not in loaded:
            loaded.add(module)
            waiting += file_imports(paths[module], paths, lazy=False)
            package = module.rpartition(".")[0]
            waiting += [package] if package else []
    return sorted(loaded)


def test_training_knows_nothing_of_its_execution() -> None:
    """Hosts are trained by an executor; which one it is, and on what, is decided above them."""
    paths = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    trains = [
        module
        for module in paths
        if covers("training", module) and not covers("training.execution", module)
    ]
    found = [
        f"{module} imports {target}"
        for module in trains
        for target in file_imports(paths[module], paths, lazy=False)
        if covers("training.execution", target)
    ]
    assert "training.step" in trains
    assert found == []


def writes_to_envs(source: str) -> list[int]:
    """Returns the lines that assign to what hangs on an env: an attribute of it, of its parts, or an entry of those."""
    targets = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute | ast.Subscript)
        and isinstance(node.ctx, ast.Store)
    ]
    return [target.lineno for target in targets if is_of_an_env(target.value)]


def is_of_an_env(node: ast.expr) -> bool:
    """Whether an expression is an env, by its name ``env``, or hangs on one."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute) and node.attr == "env":
            return True
        node = node.value
    return isinstance(node, ast.Name) and node.id == "env"


def test_an_env_is_changed_by_its_own_methods_only() -> None:
    files = [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if not covers("env", module_of(path))
    ]
    found = [
        f"{module_of(path)}:{line}"
        for path in files
        for line in writes_to_envs(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_the_table_itself_points_one_way() -> None:
    above: set[str] = set()
    for row, names in ALLOWED.items():
        # "root" is the public face: what it shows may read it (the version), the other rows may not.
        unknown = {
            name
            for name in names
            if name != "root" and not any(covers(known, name) for known in above)
        }
        assert not unknown, f"{row} names {unknown}, which is not above it"
        above.add(row)


@pytest.mark.parametrize("package", ["agents", "agents.spec"])
def test_controllers_never_import_training(package: str) -> None:
    for name in ("env", "training", "hosts", "data", "core.site", "core.slots"):
        assert not any(
            covers(may, name) or covers(name, may) for may in ALLOWED[package]
        )


def test_relative_imports_of_a_package_start_in_the_package() -> None:
    assert violations("core", "from .site import Site", is_package=True) == []
    assert len(violations("core", "from ..env import signals", is_package=True)) == 1
    assert (
        violations(
            "root",
            "from .core import stage\nfrom .config import TrainingConfig",
            is_package=True,
        )
        == []
    )


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    long: dict[str, int] = {}
    for folder, most in MAX_LINES.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SOURCE_SUFFIXES and line_count(path) > most:
                long[str(path.relative_to(ROOT))] = line_count(path)
    assert line_count(PACKAGE / "telemetry" / "event.py") > 0
    assert not long, f"more than {MAX_LINES} lines, make two of each: {long}"


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())
