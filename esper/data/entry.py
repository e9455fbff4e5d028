"""A line of the table of known tasks, and where the data of a task lies."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from esper.config import TaskConfig
from esper.data.task import Task
from esper.hosts.host import Host

VARIABLE = "ESPER_DATA"
FALLBACK = "~/.cache/esper"


def default_folder() -> Path:
    """The environment variable ``ESPER_DATA``, or ``~/.cache/esper``."""
    return Path(os.environ.get(VARIABLE) or FALLBACK).expanduser()


@dataclass(frozen=True)
class DataOptions:
    """Where data lies, and whether what is missing may be fetched from the internet."""

    folder: Path = field(default_factory=default_folder)
    download: bool = False

    @classmethod
    def of(cls, config: TaskConfig) -> DataOptions:
        folder = default_folder() if config.data is None else Path(config.data).expanduser()
        return cls(folder, config.download)


@dataclass(frozen=True)
class TaskEntry:
    """A task that is known by its name; nothing is read until one of the two is called."""

    name: str
    description: str
    load: Callable[[DataOptions], Task]
    build_host: Callable[[], Host]
    """The task's host, which needs none of its data; a saved host is built again with it."""
