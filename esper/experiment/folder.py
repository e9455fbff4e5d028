"""The folder of a run: what is written when, and going on where a checkpoint left off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from esper.config import ConfigError, TrainingConfig
from esper.control.names import schedule_file
from esper.experiment import checkpoint
from esper.experiment.environment import describe_environment
from esper.experiment.files import write_atomic, write_json
from esper.telemetry.event import BaselineMeasured
from esper.telemetry.hub import Sink
from esper.telemetry.sinks.jsonl import JsonlSink
from esper.telemetry.sinks.metrics_csv import MetricsCsvSink

EVENTS, METRICS, SCHEDULE = "events.jsonl", "metrics.csv", "schedule.toml"


class RunFolder:
    """Refuses, before anything is written, a path that holds something already. Raises ConfigError."""

    def __init__(self, path: Path, resumed: bool) -> None:
        self.path = path
        if not resumed and path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{path} already holds something; give --out a new or empty folder")

    def create(self, config: TrainingConfig) -> None:
        """The folder with its config, its environment and the schedule that is followed."""
        with writable(self.path, "run folder", "give another --out"):
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path / "config.toml", config.to_toml().encode())
            write_json(self.path / "env.json", describe_environment())
            schedule = schedule_file(config.run.controller, config.task.name)
            if schedule is not None:
                write_atomic(self.path / SCHEDULE, schedule.read_bytes())

    def follows(self, controller: str) -> str:
        """The controller's name when its run is resumed: the schedule or policy that it follows is the one kept here,
        whatever has become of the original."""
        kind, _, _ = controller.partition(":")
        kept = {"schedule": self.path / SCHEDULE, "checkpoint": self.path / checkpoint.NAME}
        return f"{kind}:{kept[kind]}" if kind in kept else controller

    def sinks(self) -> list[Sink]:
        """The event log and the metrics table. Raises ConfigError where they cannot be opened."""
        with writable(self.path, "run folder", "make room, or see to its permissions"):
            return [JsonlSink(self.path / EVENTS), MetricsCsvSink(self.path / METRICS)]

    def keep_baseline(self, event: BaselineMeasured) -> None:
        """In a file of its own, for later runs and reports."""
        write_json(self.path / "baseline.json", asdict(event))

    def write_checkpoint(self, content: bytes) -> None:
        checkpoint.write(self.path, content)

    def log_sizes(self) -> dict[str, int]:
        """Bytes of each log; both are flushed after every line."""
        return {name: (self.path / name).stat().st_size for name in (EVENTS, METRICS) if (self.path / name).exists()}

    def cut_logs(self, sizes: dict[str, Any]) -> None:
        """Take back what was logged after the checkpoint that ``sizes`` is from: it will happen again."""
        with writable(self.path, "run folder", "see to its permissions"):
            for name in (EVENTS, METRICS):
                file = self.path / name
                if not file.exists():
                    continue
                with file.open("rb+") as log:
                    log.truncate(min(int(sizes.get(name, 0)), file.stat().st_size))


@contextmanager
def writable(folder: Path, kind: str, remedy: str) -> Iterator[None]:
    """What is written in here comes before any work: where it cannot be, that is wrong input. Raises ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{kind} {folder} cannot be written: {error.strerror or error}; {remedy}") from None
