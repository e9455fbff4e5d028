"""Names of tasks in a user's Python file: ``path.py:function``, whose function returns a Task."""

from __future__ import annotations

from esper.config import ConfigError
from esper.data.user_code import refuse_untrusted, same_function


def is_user_task(name: str) -> bool:
    """True if a task's name refers to a Python file and a function."""
    return ":" in name or name.endswith(".py")


def confirmed_task(found: str, given: str | None, where: str) -> str:
    """Returns the task of a run whose files name ``found``, given the user's ``--task``, if any.

    Code is loaded only from a name that the user gave. Raises ConfigError if that is missing, or names another task.
    """
    if given is None:
        if is_user_task(found):
            raise refuse_untrusted("task", found, where)
        return found
    if not same_task(found, given):
        raise ConfigError(f"{where} is a run of the task {found!r}, not of {given!r}")
    return given


def same_task(found: str, given: str) -> bool:
    """True if two names mean the same task; a user task's file may have moved, but its function has the same name."""
    return found == given or (is_user_task(found) and is_user_task(given) and same_function(found, given))
