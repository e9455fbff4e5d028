"""Tasks from a Python file of the user: ``path.py:function``, where the function returns a Task."""

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
    """Whether a task's name is that of a Python file and a function, and not one of the known names."""
    return ":" in name or name.endswith(".py")


def refuse_untrusted(name: str, where: str) -> ConfigError:
    """The error for such a name that comes out of a file and not from the person who runs it."""
    return ConfigError(
        f"{where} names the task {name!r}, which is Python code; Esper runs code only when you name it yourself. "
        f"Review the file, then name it: --task {name} (task={name!r} from Python)"
    )


def confirmed_task(found: str, given: str | None, where: str) -> str:
    """The task of a run whose files name ``found``, where ``given`` is what the person who runs it named, if anything.

    Code is taken from what was given only. Raises ConfigError.
    """
    if given is None:
        if is_user_task(found):
            raise refuse_untrusted(found, where)
        return found
    if not same_task(found, given):
        raise ConfigError(f"{where} is a run of the task {found!r}, not of {given!r}")
    return given


def same_task(found: str, given: str) -> bool:
    """Whether two names mean one task: the file may have moved, the function is still the same."""
    both = is_user_task(found) and is_user_task(given)
    return found == given or (both and found.rpartition(":")[2] == given.rpartition(":")[2])


def load_user_task(name: str) -> Task:
    """Run the file and call its function. The task goes by ``name`` from then on, so that its run can name it.

    Raises ConfigError: no such file or function, an exception in either, or a result that is no usable Task.
    """
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
    except ConfigError as error:
        raise ConfigError(f"task {name!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"task {name!r}: {_describe(error, file)}") from error
    return replace(_checked(name, task), name=name)


def _run(file: Path) -> ModuleType:
    """The file as a module of its own, compiled afresh; classes in it can find their module while they are made."""
    digest = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    module = ModuleType(f"esper_user_task_{digest}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    exec(compile(file.read_bytes(), str(file), "exec"), module.__dict__)
    return module


def _describe(error: BaseException, file: Path) -> str:
    """What happened, and on which line of the file."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno} is not Python: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {error}"


def _checked(name: str, task: object) -> Task:
    from esper.data.task import Task

    if not isinstance(task, Task):
        raise ConfigError(f"task {name!r}: the function returned {type(task).__name__}, not an esper.data.task.Task")
    return task
