"""Reading a run folder: finished, in progress, interrupted, damaged or incomplete; and the tables of a comparison.

Nothing in a folder is executed: TOML and JSON are only parsed, and names are plain text.
"""

from __future__ import annotations

import csv
import json
import math
import shlex
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from esper.config import ConfigError
from esper.show.run_view import RunView
from esper.telemetry import event as events
from esper.telemetry.event import Event
from esper.telemetry.event_log import EventLog
from esper.telemetry.records import build
from esper.telemetry.seed_history import Life
from esper.telemetry.sinks.jsonl import being_written
from esper.telemetry.sinks.metrics_csv import TABLES
from esper.telemetry.text import clean, count

E = TypeVar("E", bound=Event)
EVENTS = "events.jsonl"
FILES = (EVENTS, "metrics.csv", "baseline.json", "config.toml", "env.json")


@dataclass
class Run:
    """Contents of a run folder; :meth:`refresh` adds what was written since."""

    folder: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    events: dict[type[Event], list[Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Parts that are missing or could not be read, except for lines of the event log."""
    writing: bool | None = None
    """Whether a process has the event log open; None if unknown."""
    silent_seconds: float = math.inf
    """Seconds since the event log was last written."""
    view: RunView = field(default_factory=RunView)
    """The state of the run so far."""
    lives: dict[tuple[int, int], Life] = field(default_factory=dict)
    """The life of every host, by episode and env."""

    def __post_init__(self) -> None:
        self.log = EventLog(self.folder / EVENTS)

    def of(self, event: type[E]) -> list[E]:
        """Returns the events of that class, in the order in which they were logged."""
        return self.events.get(event, [])

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
        if restarted or not self.log.exists:
            self.events.clear()
            self.lives.clear()
            self.view = RunView()
        for event in new:
            self._add(event)
        if self.log.exists:
            self.silent_seconds = max(0.0, time.time() - self.log.path.stat().st_mtime)
        else:
            self.problems.append(f"{EVENTS} does not exist: the history of the hosts by epoch is unknown")
        self._fill_in()
        return bool(new) or restarted

    def _add(self, event: Event) -> None:
        self.events.setdefault(type(event), []).append(event)
        self.view.handle(event)
        if isinstance(event, events.HostEvent):
            key = (event.episode, event.env)
            if key not in self.lives:
                self.lives[key] = Life(event.episode, event.env)
            self.lives[key].handle(event)

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

    def _fill_in(self) -> None:
        """Takes data missing in the event log from other files."""
        # Before the first epoch, the baseline may not be measured yet; simulated hosts have neither, and a loop outside
        # Esper has no tier and no baseline.
        started = self.last(events.RunStarted)
        trains = self.of(events.EpochCompleted) and (started is None or started.tier is not None)
        if not self.of(events.BaselineMeasured) and (trains or not self.log.exists):
            fields = self._read("baseline.json", json.loads)
            try:
                if fields is not None:
                    self._add(build(events.BaselineMeasured, fields))
            except ValueError as error:
                self.problems.append(f"baseline.json cannot be read: {clean(error)}")
        if self.log.exists:
            return
        try:
            for event in read_metrics(self.folder / "metrics.csv"):
                self._add(event)
            self.problems.append("rounds were read from metrics.csv instead")
        except FileNotFoundError:
            self.problems.append("metrics.csv does not exist")
        except (OSError, ValueError, csv.Error) as error:
            self.problems.append(f"metrics.csv cannot be read: {clean(error)}")

    @property
    def rounds(self) -> int:
        """Planned number of rounds; 0 if unknown."""
        planned = self.view.rounds or self.value("run", "rounds")
        if isinstance(planned, int):
            return planned
        return 0

    @property
    def slots(self) -> list[str]:
        """Slots in the host's order, or sorted by name if the start of the run is not logged."""
        started = self.last(events.RunStarted)
        named = list(started.slots) if started else []
        others = {change.slot for change in self.of(events.StageChanged)}.difference(named)
        return named + sorted(others)

    @property
    def learns(self) -> bool:
        return self.last(events.PolicyUpdated) is not None or self.value("run", "controller") == "ppo"

    @property
    def finished(self) -> bool:
        """Whether all rounds were played and compared."""
        return self.last(events.RunCompleted) is not None and self.view.done >= self.rounds

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
        if self.writing is None and self.log.exists:
            return "unknown"
        if self.writing:
            return "running"
        return "interrupted"

    def state_words(self) -> str:
        """Describes the state and the progress."""
        state = self.state()
        if state == "finished":
            words = f"finished: {count(self.rounds, 'round')} played"
            if any(event.comparisons for event in self.of(events.RunCompleted)):
                words += " and compared"
            return words
        if state == "unknown":
            state = f"not finished (last written {self.silent_seconds:,.0f} s ago; it may still be running)"
        return f"{state}: {self._progress()}"

    def _progress(self) -> str:
        rounds = count(self.rounds, "round")
        if self.view.done >= self.rounds > 0:
            if self.last(events.ArmPlayed):
                return f"all {rounds} played, the comparison has started"
            return f"all {rounds} played, the comparison has not started"
        if self.view.done or self.of(events.EpochCompleted):
            return f"{self.view.done} of {rounds} completed"
        if self.last(events.BaselineMeasured):
            return "before the first round"
        return "before the first round, baseline not measured yet"


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
    parents = [folder.parent, Path("runs")]
    if folder.is_dir():
        problem = "is not a run folder: it has no events.jsonl"
        parents = [folder, folder / "runs", Path("runs")]
    runs: set[str] = set()
    for parent in parents:
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
    """Whether the folder holds a run: its event log, or at least two of its other files."""
    present = [name for name in FILES if (folder / name).is_file()]
    return EVENTS in present or len(present) >= 2


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


def read_metrics(path: Path) -> list[events.RoundCompleted]:
    """Returns the rounds of a metrics table; an incomplete last row is left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: a value is missing or wrong; the message has its row and column.
    """
    text = path.read_bytes().decode("utf-8")
    whole = text[: text.rfind("\n") + 1]
    rows = csv.DictReader(whole.splitlines())
    return [_round(row, number) for number, row in enumerate(rows, start=2)]


def _round(row: dict[str, str], number: int) -> events.RoundCompleted:
    fields: dict[str, Any] = {"phase_seconds": {}, "memory": {}}
    try:
        for name, cell in row.items():
            prefix, table, entry = name.partition("/")
            if not table:
                fields[name] = _cell(cell)
            elif cell and prefix in TABLES:
                fields[TABLES[prefix]][entry] = _cell(cell)
        return build(events.RoundCompleted, fields)
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"row {number}: {error}") from None


def _cell(cell: str) -> Any:
    if not cell:
        return None
    try:
        return json.loads(cell)
    except ValueError:
        return cell  # nan and inf stand as words
