"""The table of known tasks."""

from __future__ import annotations

from esper.config import ConfigError
from esper.data import chars, digits, images, tinystories
from esper.data.entry import DataOptions, TaskEntry
from esper.data.task import Task
from esper.data.user_task import FORM, is_user_task, load_user_task, refuse_untrusted
from esper.hosts.host import Host

TASKS: dict[str, TaskEntry] = {
    entry.name: entry
    for entry in (
        TaskEntry("digits", digits.DESCRIPTION, lambda _: digits.load(), digits.build_host),
        TaskEntry("chars", chars.DESCRIPTION, lambda _: chars.load(), chars.build_host),
        *(preset.entry() for preset in images.PRESETS),
        TaskEntry("tinystories", tinystories.DESCRIPTION, tinystories.load, tinystories.build_host),
    )
}

SIMULATED: dict[str, str] = {"planted": "simulated hosts under a known law, to try controllers on; 64 envs, no data"}
"""Tasks whose hosts are simulated, with what they are: they have an env (``esper.env.make``) and nothing to load."""


def load_task(name: str, options: DataOptions | None = None, trusted: bool = True) -> Task:
    """The task with its data.

    Args:
        name: a known name, or ``path.py:function`` of a file whose function returns a Task.
        options: where data lies; None: the default folder, and nothing is downloaded.
        trusted: whether the name comes from the person who runs this; False where it was read from a run's files. Code
            in a file is run only when it is trusted.

    Raises ConfigError listing the known names when there is no task of that name, when it has no data, when its data is
    missing or corrupt, or when it is code that is not trusted.
    """
    if is_user_task(name):
        if not trusted:
            raise refuse_untrusted(name, "the run")
        return load_user_task(name)
    return _entry(name).load(options or DataOptions())


def build_host(name: str, trusted: bool = True) -> Host:
    """A task's host, without reading its data. Raises ConfigError as :func:`load_task` does."""
    if is_user_task(name):
        return load_task(name, trusted=trusted).build_host()
    return _entry(name).build_host()


def _entry(name: str) -> TaskEntry:
    if name in SIMULATED:
        raise ConfigError(
            f"task {name!r} is simulated: it has no data and no network. Its env comes from esper.env.make.make_env. "
            f"Tasks with data: {', '.join(TASKS)}"
        )
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}; known: {', '.join([*TASKS, *SIMULATED])}, or a file: {FORM}")
    return TASKS[name]
