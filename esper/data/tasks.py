"""The table of known tasks."""

from __future__ import annotations

from esper.config import ConfigError
from esper.data import digits
from esper.data.task import Task, TaskEntry

TASKS: dict[str, TaskEntry] = {entry.name: entry for entry in (TaskEntry("digits", digits.DESCRIPTION, digits.load),)}

SIMULATED: dict[str, str] = {"planted": "simulated hosts under a known law, to try controllers on; 64 envs, no data"}
"""Tasks whose hosts are simulated, with what they are: they have an env (``esper.env.make``) and nothing to load."""


def load_task(name: str) -> Task:
    """Raises ConfigError listing the known names when there is no task of that name, or when it has no data."""
    if name in SIMULATED:
        raise ConfigError(
            f"task {name!r} is simulated: it has no data and no network. Its env comes from esper.env.make.make_env. "
            f"Tasks with data: {', '.join(TASKS)}"
        )
    entry = TASKS.get(name)
    if entry is None:
        raise ConfigError(f"unknown task {name!r}; known: {', '.join(TASKS)}")
    return entry.load()
