"""Tasks from a user's Python file: ``path.py:function``, whose function returns a Task."""

from __future__ import annotations

import hashlib
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from esper.config import ConfigError

if TYPE_CHECKING:
    from esper.data.task import Task

FORM = "path.py:function"


def is_user_task(name: str) -> bool:
    """True if a task's name refers to a Python file and a function."""
    return ":" in name or name.endswith(".py")


def refuse_untrusted(name: str, where: str) -> ConfigError:
    """Makes the error for a user task that is named by a file (``where``) and not by the user."""
    return ConfigError(
        f"{where} names the task {name!r}, which is Python code; Esper runs code only when you name it yourself. "
        f"Review the file, then name it: --task {name} (task={name!r} from Python)"
    )


def confirmed_task(found: str, given: str | None, where: str) -> str:
    """Returns the task of a run whose files name ``found``, given the user's ``--task``, if any.

    Code is loaded only from a name that the user gave. Raises ConfigError if that is missing, or names another task.
    """
    if given is None:
        if is_user_task(found):
            raise refuse_untrusted(found, where)
        return found
    if not same_task(found, given):
        raise ConfigError(f"{where} is a run of the task {found!r}, not of {given!r}")
    return given


def same_task(found: str, given: str) -> bool:
    """True if two names mean the same task; a user task's file may have moved, but its function has the same name."""
    both = is_user_task(found) and is_user_task(given)
    return found == given or (both and found.rpartition(":")[2] == given.rpartition(":")[2])


def load_user_task(name: str) -> Task:
    """Runs the file, calls its function, and returns the task under ``name``, by which its run refers to it.

    Raises ConfigError if there is no such file or function, if one of them raises, or if the result is not a Task.
    """
    from esper.data.task import Task

    path, _, function = name.rpartition(":")
    if not path.endswith(".py") or not function.isidentifier():
        raise ConfigError(f"task {name!r} is not of the form {FORM}, such as mine.py:make_task")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"task {name!r}: there is no file {file}")
    try:
        make = getattr(_run(file), function, None)
        if not callable(make):
            raise ConfigError(f"it has no function {function}")
        task = make()
        if not isinstance(task, Task):
            raise ConfigError(f"the function returned {type(task).__name__}, not an esper.data.task.Task")
    except ConfigError as error:
        raise ConfigError(f"task {name!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"task {name!r}: {_describe(error, file)}") from error
    return replace(task, name=name)


def _run(file: Path) -> ModuleType:
    """Runs the file as a new module, which is registered first, so that its classes find their module."""
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    module = ModuleType(f"esper_user_task_{digest}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    return module


def _describe(error: BaseException, file: Path) -> str:
    """Describes the error, with its line in the file."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno} is not Python: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {error}"
