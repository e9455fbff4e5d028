"""The folder of a run: what is written when, and going on where a checkpoint left off."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from esper.config import ConfigError, TrainingConfig
from esper.control.names import schedule_file
from esper.files import checkpoint
from esper.files.atomic import write_atomic, write_json
from esper.files.system_info import describe_environment
from esper.telemetry.event import BaselineMeasured
from esper.telemetry.hub import Sink
from esper.telemetry.sinks.jsonl import JsonlSink
from esper.telemetry.sinks.metrics_csv import MetricsCsvSink

CONFIG = checkpoint.CONFIG
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
            write_atomic(self.path / CONFIG, config.to_toml().encode())
            write_json(self.path / "env.json", describe_environment())
            schedule = schedule_file(config.run.controller, config.task.name)
            if schedule is not None:
                write_atomic(self.path / SCHEDULE, schedule.read_bytes())

    def follows(self, controller: str) -> str:
        """The controller's name when its run is resumed: the schedule or policy that it follows is the one kept here,
        whatever has become of the original."""
        kind, _, _ = controller.partition(":")
        if kind == "schedule":
            return f"schedule:{self.path / SCHEDULE}"
        return f"checkpoint:{self.path}" if kind in ("checkpoint", "pretrained") else controller

    def sinks(self) -> list[Sink]:
        """The event log and the metrics table. Raises ConfigError where they cannot be opened."""
        with writable(self.path, "run folder", "make room, or see to its permissions"):
            return [JsonlSink(self.path / EVENTS), MetricsCsvSink(self.path / METRICS)]

    def keep_baseline(self, event: BaselineMeasured) -> None:
        """In a file of its own, for later runs and reports."""
        write_json(self.path / "baseline.json", asdict(event))

    def write_checkpoint(self, content: bytes, keep: bool = True) -> None:
        """The logs that it counts on reach the disk before it does; ``keep`` the last one, which is not broken."""
        for name in self.log_sizes():
            with (self.path / name).open("rb") as log:
                os.fsync(log.fileno())
        checkpoint.write(self.path, content, keep)

    def log_sizes(self) -> dict[str, int]:
        """Bytes of each log; both are flushed after every line."""
        return {name: (self.path / name).stat().st_size for name in (EVENTS, METRICS) if (self.path / name).exists()}

    def cut_logs(self, sizes: dict[str, Any]) -> list[str]:
        """Take back what was logged after the checkpoint that ``sizes`` is from: it will happen again. Says what of a
        log is missing, in words."""
        lost: list[str] = []
        with writable(self.path, "run folder", "see to its permissions"):
            for name in (EVENTS, METRICS):
                file, wanted = self.path / name, int(sizes.get(name, 0))
                there = file.stat().st_size if file.exists() else 0
                if there < wanted:
                    lost.append(f"{file} has lost its last {wanted - there} bytes; what they told is gone")
                if there > wanted:
                    with file.open("rb+") as log:
                        log.truncate(wanted)
        return lost


@contextmanager
def writable(folder: Path, kind: str, remedy: str) -> Iterator[None]:
    """What is written in here comes before any work: where it cannot be, that is wrong input. Raises ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{kind} {folder} cannot be written: {error.strerror or error}; {remedy}") from None
