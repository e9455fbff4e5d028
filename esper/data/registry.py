"""Entries of the table of known tasks, and the location of their data."""

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
    """Returns the folder in the environment variable ``ESPER_DATA``, or ``~/.cache/esper``."""
    return Path(os.environ.get(VARIABLE) or FALLBACK).expanduser()


@dataclass(frozen=True)
class DataOptions:
    """The data folder, and whether missing data may be downloaded."""

    folder: Path = field(default_factory=default_folder)
    download: bool = False

    @classmethod
    def of(cls, config: TaskConfig) -> DataOptions:
        folder = default_folder() if config.data is None else Path(config.data).expanduser()
        return cls(folder, config.download)


@dataclass(frozen=True)
class TaskEntry:
    """A known task; nothing is read until ``load`` or ``build_host`` is called."""

    name: str
    description: str
    load: Callable[[DataOptions], Task]
    build_host: Callable[[], Host]
    """Makes the task's host without loading the task; also used to rebuild saved hosts."""
