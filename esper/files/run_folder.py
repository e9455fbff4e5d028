"""The run folder: which files are written when, and how a resumed run continues them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from esper.agents.script import schedule_file
from esper.agents.spec import ControllerSpec
from esper.config import ConfigError, TrainingConfig
from esper.files import checkpoint
from esper.files.atomic import write_atomic, write_json
from esper.files.claim import require_empty
from esper.files.system_info import describe_environment
from esper.telemetry.hub import Sink
from esper.telemetry.sinks.jsonl import JsonlSink
from esper.telemetry.sinks.metrics_csv import MetricsCsvSink

CONFIG = checkpoint.CONFIG
EVENTS = "events.jsonl"
METRICS = "metrics.csv"
SCHEDULE = "schedule.toml"


BEFORE_ANY_CHECKPOINT = {CONFIG, "env.json", EVENTS, METRICS, SCHEDULE}
"""Files that a run writes before its first checkpoint."""


class RunFolder:
    """The folder of one run. For a new run, raises ConfigError if ``path`` is not empty, before anything is written."""

    def __init__(self, path: Path, resumed: bool) -> None:
        self.path = path
        if not resumed:
            require_empty(path)

    def create(self, config: TrainingConfig) -> None:
        """Creates the folder with the config, a description of the environment, and the schedule if one is followed.

        Raises ConfigError if another run has used it since, or it cannot be written.
        """
        require_empty(self.path)
        with writable(self.path, "run folder", "give another folder"):
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path / CONFIG, config.to_toml().encode())
            write_json(self.path / "env.json", describe_environment())
            schedule = schedule_file(ControllerSpec.of(config.run.controller), config.task.name)
            if schedule is not None:
                write_atomic(self.path / SCHEDULE, schedule.read_bytes())

    @classmethod
    def holds_nothing_saved(cls, path: Path) -> bool:
        """Whether ``path`` holds a run that ended before its first checkpoint, and nothing else."""
        return (path / CONFIG).exists() and BEFORE_ANY_CHECKPOINT.issuperset(file.name for file in path.iterdir())

    def follows(self, controller: str) -> str:
        """Returns the controller's name on resuming, with the path of the copy kept here.

        The original schedule or policy may have changed or disappeared since.
        """
        spec = ControllerSpec.of(controller)
        if not spec.follows:
            return controller
        # The checkpoint of this run has the policy.
        return spec.following(self.path / SCHEDULE if spec.kind == "schedule" else self.path)

    def sinks(self) -> list[Sink]:
        """Returns the event log and the metrics table. Raises ConfigError if they cannot be opened."""
        with writable(self.path, "run folder", "free disk space, or check its permissions"):
            return [
                JsonlSink(self.path / EVENTS),
                MetricsCsvSink(self.path / METRICS),
            ]

    def write_checkpoint(self, content: bytes, keep: bool = True) -> None:
        """Syncs the logs to disk, then writes the checkpoint that refers to them.

        ``keep``: whether the last checkpoint is intact, and kept as the previous one.
        """
        for name in self.log_sizes():
            with (self.path / name).open("rb") as log:
                os.fsync(log.fileno())
        checkpoint.write(self.path, content, keep)

    def log_sizes(self) -> dict[str, int]:
        """Returns the size of each log in bytes; both logs are flushed after every line."""
        sizes = {}
        for name in (EVENTS, METRICS):
            file = self.path / name
            if file.exists():
                sizes[name] = file.stat().st_size
        return sizes

    def cut_logs(self, sizes: dict[str, Any]) -> list[str]:
        """Truncates the logs to ``sizes``, their sizes at the checkpoint; the resumed run writes the rest again.

        Returns a message for each log that is shorter than that. Raises ConfigError if a log cannot be written.
        """
        lost: list[str] = []
        with writable(self.path, "run folder", "check its permissions"):
            written = self.log_sizes()
            for name in (EVENTS, METRICS):
                file = self.path / name
                wanted = int(sizes.get(name, 0))
                size = written.get(name, 0)
                if size < wanted:
                    lost.append(f"{file} is missing its last {wanted - size} bytes; their content is lost")
                # What was written after the checkpoint is written again.
                if size > wanted:
                    os.truncate(file, wanted)
        return lost


@contextmanager
def writable(folder: Path, kind: str, remedy: str) -> Iterator[None]:
    """Converts OSError to ConfigError: files written in this block precede any work, so a failure is invalid input."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{kind} {folder} cannot be written: {error.strerror or error}; {remedy}") from None
