"""The table of known tasks."""

from __future__ import annotations

from esper.config import ConfigError
from esper.data import digits
from esper.data.task import Task, TaskEntry

TASKS: dict[str, TaskEntry] = {entry.name: entry for entry in (TaskEntry("digits", digits.DESCRIPTION, digits.load),)}


def load_task(name: str) -> Task:
    """Raises ConfigError listing the known names when there is no task of that name."""
    entry = TASKS.get(name)
    if entry is None:
        raise ConfigError(f"unknown task {name!r}; known: {', '.join(TASKS)}")
    return entry.load()
