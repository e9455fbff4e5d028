"""Functions in a user's Python file, ``path.py:function``, that make tasks and controllers."""

from __future__ import annotations

import ast
import hashlib
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from esper.agents.spec import FORM, UNNAMED, ControllerSpec
from esper.config import ConfigError

Made = TypeVar("Made")
Named = TypeVar("Named", bound=Callable[..., Any])


def is_user_task(name: str) -> bool:
    """True if a task's name refers to a Python file and a function."""
    return ":" in name or name.endswith(".py")


def refuse_untrusted(kind: str, name: str, where: str, option: str | None = None) -> ConfigError:
    """Makes the error for a task or controller (``kind``) in a file that is named by ``where`` and not by the user."""
    return ConfigError(
        f"{where} names the {kind} {name!r}, which is Python code; Esper runs code only when you name it yourself. "
        f"Review the file, then name it: {option or f'--{kind}'} {name} ({kind}={name!r} from Python)"
    )


def confirmed(
    kind: str,
    recorded: str,
    named: str | Named | None,
    where: str,
    option: str | None = None,
) -> str | Named:
    """Returns the task or controller (``kind``) to resume with: the one ``recorded`` in the files of ``where``, as the
    user may have ``named`` it.

    Code is loaded only from a name, or is a callable, that the user gave. Raises ConfigError if that is missing or
    means another task or controller, or if the recorded one was a callable without a name.
    """
    before = ControllerSpec.of(recorded)
    if before.kind == UNNAMED:
        raise ConfigError(
            f"{where} cannot be resumed: its {kind} was the callable {before.path}, which no file and name lead to, so "
            "nothing shows that another callable is the same. Use a function or class of a file, "
            f"{FORM}, for a run that is to be resumed"
        )
    if named is None:
        if before.is_code:
            raise refuse_untrusted(kind, recorded, where, option)
        return recorded
    now = ControllerSpec.of(named)
    if not before.same_as(now):
        raise ConfigError(f"{where} is a run of the {kind} {recorded!r}, not of {now.name!r}")
    return named


def same_task(found: str, given: str) -> bool:
    """True if two names mean the same task; a user task's file may have moved, but its function has the same name."""
    return ControllerSpec.of(found).same_as(ControllerSpec.of(given))


def run_user_code(kind: str, name: str, use: Callable[[Callable[..., Any]], Made]) -> Made:
    """Runs the file of ``name`` as a new module, and returns ``use(function)``.

    The file can import its neighbours: its folder becomes the first entry of ``sys.path``, as if Python ran the file.

    Raises ConfigError if there is no such file or function, if the file, the function or ``use`` raises, or if a module
    of a neighbour's name was imported from elsewhere before.
    """
    spec = ControllerSpec.of(name)
    if not spec.is_code or not spec.function.isidentifier():
        raise ConfigError(f"{kind} {name!r} is not of the form {FORM}, such as mine.py:make_{kind}")
    file = Path(spec.path)
    if not file.is_file():
        raise ConfigError(f"{kind} {name!r}: there is no file {file}")
    try:
        make = getattr(_run(file), spec.function, None)
        if not callable(make):
            raise ConfigError(f"it has no function {spec.function}")
        return use(make)
    except ConfigError as error:
        raise ConfigError(f"{kind} {name!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{kind} {name!r}: {_describe(error, file)}") from error


def _run(file: Path) -> ModuleType:
    """Runs the file as a new module, which is registered first, so that its classes find their module."""
    tree = ast.parse(file.read_bytes(), str(file))
    folder = file.resolve().parent
    _check_neighbours(tree, folder)
    if sys.path[0] != str(folder):
        sys.path.insert(0, str(folder))  # for good, because functions may import when they are called
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    module = ModuleType(f"esper_user_code_{digest}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    exec(compile(tree, str(file), "exec"), module.__dict__)
    return module


def _check_neighbours(tree: ast.Module, folder: Path) -> None:
    """Raises ConfigError if an import means a file of this folder, but would find another module of the same name.

    Neighbours that are imported are checked in turn.
    """
    waiting = _imported(tree)
    seen: set[str] = set()
    while waiting:
        name = min(waiting)  # so that the same name is reported each time
        waiting.remove(name)
        places = (folder / f"{name}.py", folder / name / "__init__.py")
        neighbour = next((place for place in places if place.is_file()), None)
        if neighbour is None or name in seen:
            continue
        seen.add(name)
        loaded = _loaded_from(name)
        if loaded is not None and Path(loaded).resolve() != neighbour.resolve():
            raise ConfigError(f"it imports {name}, which was imported from {loaded} before: rename {neighbour}")
        waiting |= _imported(ast.parse(neighbour.read_bytes(), str(neighbour)))


def _loaded_from(name: str) -> str | None:
    """Returns the file of an imported module, or words for one without a file; None if it is not imported."""
    if name not in sys.modules:
        return None
    return getattr(sys.modules[name], "__file__", None) or "Python itself"


def _imported(tree: ast.Module) -> set[str]:
    """Returns the first parts of the names of all modules that are imported anywhere in a file."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:  # not relative
            names.add(str(node.module))
    return {name.partition(".")[0] for name in names}


def _describe(error: BaseException, file: Path) -> str:
    """Describes the error, with its line in the file."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f"line {error.lineno} is not Python: {error.msg}"
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(file):
            where = f"line {frame.lineno}: "  # the innermost one stays
    return f"{where}{type(error).__name__}: {error}"
