"""The table of known tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from esper.config import ConfigError
from esper.data import digits, images, text, tinystories
from esper.data.names import require_data
from esper.data.task import DataOptions, Task
from esper.data.user_code import is_user_task, refuse_untrusted, run_user_code
from esper.hosts.host import Host


@dataclass(frozen=True)
class TaskEntry:
    """A known task; nothing is read until ``load`` or ``build_host`` is called."""

    name: str
    description: str
    load: Callable[[DataOptions], Task]
    build_host: Callable[[], Host]
    """Makes the task's host without loading the task; also used to rebuild saved hosts."""


_ENTRIES: tuple[TaskEntry | images.ImagePreset, ...] = (
    TaskEntry("digits", digits.DESCRIPTION, lambda _: digits.load(), digits.build_host),
    TaskEntry("digits_table", digits.TABLE, lambda _: digits.load_table(), digits.build_mlp),
    TaskEntry("mnist5k", images.MNIST5K, lambda _: images.load_mnist5k(), images.mnist5k_host),
    TaskEntry(
        "chars",
        text.CHARS,
        lambda _: text.character_task("chars", text.CHARS, text.chars_parts()),
        lambda: text.character_host(text.chars_parts()),
    ),
    TaskEntry(
        "code",
        text.CODE,
        lambda _: text.character_task("code", text.CODE, text.code_parts()),
        lambda: text.character_host(text.code_parts()),
    ),
    *images.PRESETS,
    TaskEntry(tinystories.NAME, tinystories.DESCRIPTION, tinystories.load, tinystories.build_host),
)
TASKS: dict[str, TaskEntry | images.ImagePreset] = {entry.name: entry for entry in _ENTRIES}


def load_task(name: str, options: DataOptions | None = None, trusted: bool = True) -> Task:
    """Loads a task with its data.

    Args:
        name: a known name, or ``path.py:function`` of a file whose function returns a Task.
        options: data folder and download permission; None: the default folder, and no downloads.
        trusted: False if the name was read from a run's files, so that code in a file must not run.

    Raises:
        ConfigError: the name is unknown (lists the known ones), the task is simulated, its data is missing or corrupt,
            or it is code that is not trusted, that fails, or that makes no Task.
    """
    if is_user_task(name):
        if not trusted:
            raise refuse_untrusted("task", name, "the run")
        return replace(run_user_code("task", name, _task_of), name=name)  # by this name its run refers to it
    return _entry(name).load(options or DataOptions())


def build_host(name: str, trusted: bool = True) -> Host:
    """Makes a task's host; a known task is not loaded for that. Raises ConfigError as :func:`load_task` does."""
    if is_user_task(name):
        return load_task(name, trusted=trusted).build_host()
    return _entry(name).build_host()


def _task_of(make: Callable[[], object]) -> Task:
    task = make()
    if not isinstance(task, Task):
        raise ConfigError(f"the function returned {type(task).__name__}, not an esper.data.task.Task")
    return task


def _entry(name: str) -> TaskEntry | images.ImagePreset:
    require_data(name)
    return TASKS[name]
