"""Reading a run folder: finished, in progress or interrupted; and the tables of a comparison.

Nothing in a folder is executed: TOML and JSON are only parsed, and names are plain text.
"""

from __future__ import annotations

import json
import math
import shlex
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from esper.config import ConfigError
from esper.show.console import lines
from esper.show.view import E, RunView
from esper.telemetry import event as events
from esper.telemetry.event_log import EventLog
from esper.telemetry.sinks.jsonl import being_written
from esper.telemetry.text import clean, count

EVENTS = "events.jsonl"


@dataclass
class Run:
    """Contents of a run folder; :meth:`refresh` adds what was written since."""

    folder: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Parts that are missing or could not be read, except for lines of the event log."""
    writing: bool | None = None
    """Whether a process has the event log open; None if unknown."""
    silent_seconds: float = math.inf
    """Seconds since the event log was last written."""
    view: RunView = field(default_factory=RunView)
    """All that its event log says."""
    lines: list[str] = field(default_factory=list)
    """The lines that the run has printed."""

    def __post_init__(self) -> None:
        self.log = EventLog(self.folder / EVENTS)

    def of(self, event: type[E]) -> list[E]:
        """Returns the events of that class, in the order in which they were logged."""
        return self.view.of(event)

    def last(self, event: type[E]) -> E | None:
        """Returns the newest event of that class."""
        return self.view.last(event)

    def refresh(self) -> bool:
        """Reads what is new in the folder, and returns whether anything in the event log changed."""
        self.problems.clear()
        self.config = self._read("config.toml", tomllib.loads) or {}
        self.environment = self._read("env.json", json.loads) or {}
        self.writing = being_written(self.log.path)  # checked first, so that a run's last lines are read below
        new, restarted = self.log.read()
        if restarted:
            self.view = RunView()
            self.lines.clear()
        for event in new:
            self.view.handle(event)
            self.lines += lines(event, self.view)
        if self.log.path.exists():
            self.silent_seconds = max(0.0, time.time() - self.log.path.stat().st_mtime)
        return bool(new) or restarted

    def all_problems(self) -> list[str]:
        return [*self.log.problems(), *self.problems]

    def _read(self, name: str, parse: Any) -> dict[str, Any] | None:
        path = self.folder / name
        try:
            content = parse(path.read_bytes().decode("utf-8"))
        except FileNotFoundError:
            self.problems.append(f"{name} does not exist")
        except (OSError, ValueError, RecursionError) as error:
            self.problems.append(f"{name} cannot be read: {clean(error)}")
        else:
            if isinstance(content, dict):
                return content
            self.problems.append(f"{name} cannot be used: expected a table of names and values")
        return None

    @property
    def finished(self) -> bool:
        """Whether all rounds were played and compared."""
        return self.last(events.RunCompleted) is not None and self.view.done >= self.view.rounds

    @property
    def about(self) -> dict[str, str]:
        """Its task, controller and seed; of a loop that was resumed in a new folder, as far as its config tells."""
        started = self.last(events.RunStarted)
        if started is not None:
            return {"task": started.task, "controller": started.controller, "seed": str(started.seed)}
        places = {"task": ("task", "name"), "controller": ("run", "controller"), "seed": ("run", "seed")}
        return {name: str(self.value(*place) or "not known") for name, place in places.items()}

    def value(self, section: str, key: str) -> Any:
        """Returns a config value, or None if it is missing."""
        table = self.config.get(section)
        if isinstance(table, dict):
            return table.get(key)
        return None

    def state(self) -> str:
        """Returns ``finished``, ``running``, ``interrupted``, or ``unknown`` if locks do not tell whether it runs."""
        if self.finished:
            return "finished"
        if self.writing is None:
            return "unknown"
        if self.writing:
            return "running"
        return "interrupted"

    def state_words(self) -> str:
        """Describes the state and the progress."""
        state = self.state()
        rounds = count(self.view.rounds, "round")
        if state == "finished":
            words = f"finished: {rounds} played"
            if any(event.comparisons for event in self.of(events.RunCompleted)):
                words += " and compared"
            return words
        if state == "unknown":
            state = f"not finished (last written {self.silent_seconds:,.0f} s ago; it may still be running)"
        if self.view.done >= self.view.rounds > 0:
            return f"{state}: all {rounds} played, not all compared"
        return f"{state}: {self.view.done} of {rounds} completed"


Runs = Sequence[Run]


def open_run(folder: Path, name: str | None = None) -> Run:
    """Returns the run in ``folder``, as it is now. Raises ConfigError, suggesting other folders, if it holds none."""
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; give the folder of the run, perhaps {folder.absolute().parent}")
    if is_comparison(folder):
        raise ConfigError(
            f"{folder} is a comparison, not a run: {shlex.join(['esper', 'report', str(folder)])} makes a page of it "
            "alone, and esper show prints its tables"
        )
    if not is_run(folder):
        raise ConfigError(_no_run(folder))
    run = Run(folder, clean(name or folder.absolute().name))
    run.refresh()
    return run


def _no_run(folder: Path) -> str:
    """Returns the message about a folder that holds no run, with some that do."""
    problem = "does not exist"
    if folder.is_dir():
        problem = "is not a run folder: it has no events.jsonl"
    elif folder.exists():
        problem = "is not a folder"
    runs: set[str] = set()
    for parent in (folder, folder / "runs", folder.parent, Path("runs")):
        runs.update(map(str, _runs_in(parent)))
    advice = "which `esper run` prints when it starts"
    if runs:
        advice = f"such as {', '.join(sorted(runs)[:5])}"
    return f"{folder} {problem}; give the folder of a run, {advice}"


def is_comparison(folder: Path) -> bool:
    """Whether ``folder`` is that of a comparison, and not of a run."""
    return (folder / "comparison.json").is_file()


def saved_tables(folder: Path) -> str:
    """Returns the tables that a comparison has left in its folder. Raises ConfigError if it has no result yet."""
    try:
        return (folder / "table.txt").read_text(encoding="utf-8")
    except OSError:
        again = shlex.join(["esper", "compare", "--resume", str(folder)])
        raise ConfigError(
            f"{folder} is a comparison without a result yet, in progress or interrupted; to continue it: {again}"
        ) from None


def is_run(folder: Path) -> bool:
    """Whether the folder holds a run: its event log."""
    return (folder / EVENTS).is_file()


def _runs_in(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir() and is_run(path)]
    except OSError:
        return []


def open_runs(folders: Sequence[Path]) -> list[Run]:
    """Returns several runs, each named by as much of its path as tells it apart.

    Raises:
        ConfigError: a folder is given twice, or holds no run.
    """
    paths = [folder.resolve() for folder in folders]
    for place, path in enumerate(paths):
        if path in paths[:place]:
            raise ConfigError(f"{folders[place]} is given twice; give each run once")
    length = 1
    while len({path.parts[-length:] for path in paths}) < len(paths):
        length += 1
    runs = []
    for folder, path in zip(folders, paths, strict=True):
        runs.append(open_run(folder, "/".join(path.parts[-length:])))
    return runs
