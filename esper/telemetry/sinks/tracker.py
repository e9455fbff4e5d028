"""Sink for external experiment trackers: wandb, or trackio, which has the same functions."""

from __future__ import annotations

import importlib
import io
import json
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from esper.telemetry.event import AnomalyDetected, Event, PolicyUpdated, PracticeRound, RoundCompleted, RunCompleted
from esper.telemetry.sinks.scalars import KINDS, PRACTICE, Scalars

LIBRARIES = ("wandb", "trackio")
STEP = "global_step"
"""Step metric, logged with every number and used as the x axis."""
ORDER: tuple[type[Event], ...] = (RoundCompleted, PolicyUpdated, AnomalyDetected, RunCompleted)
"""Order of the events of one step."""


@contextmanager
def without_terminal() -> Iterator[None]:
    """Leaves a library no terminal to ask its user in, such as for a key that wandb lacks: then it raises an error.

    A question would wait in its thread, under the display of the run, for an answer that nobody gives.
    """
    before = sys.stdin
    sys.stdin = io.StringIO()
    try:
        yield
    finally:
        sys.stdin = before


def active_run(library: Any) -> Any:
    """Returns the run of wandb or trackio that is active in this thread; None without one."""
    if hasattr(library, "context_vars"):  # trackio
        return library.context_vars.current_run.get()
    return getattr(library, "run", None)


class TrackerSink:
    """Sends scalars to ``library``, starting with the first event.

    A run of the library that is active when the sink is made belongs to its user: scalars are logged to it, and it is
    never finished. Otherwise the sink starts a run and finishes it.

    The tracker's run id and the last sent position are stored as ``LIBRARY.json`` in the run folder: a resumed run
    continues the same tracker run, and does not send again what was sent before the interruption.

    Args:
        library: ``wandb`` or ``trackio``. Its own settings decide where it keeps its files and whether it uses the
            network (``WANDB_MODE=offline``).
        folder: the run folder; its name is the name of the run.
        project: the project that groups runs.
        config: the run's config values, nested.
        steps: env steps done before the first event.

    Raises:
        ValueError: ``library`` is unknown.
    """

    wants = KINDS

    def __init__(
        self,
        library: str,
        folder: str | Path,
        project: str,
        config: dict[str, Any],
        steps: int = 0,
    ) -> None:
        if library not in LIBRARIES:
            raise ValueError(f"unknown tracker {library!r}; known: {', '.join(LIBRARIES)}")
        self.library = library
        self.folder = Path(folder)
        self.project = project
        self.config = config
        self.state = self.folder / f"{library}.json"
        self.scalars = Scalars(steps)
        self._module: Any = importlib.import_module(library)
        self._run = active_run(self._module)
        """The run that scalars are logged to; None before the first event unless it is the user's."""
        self._begun = False
        self._users = self._run is not None
        self._id = uuid.uuid4().hex[:12]
        self._sent = [-1, 0]
        """Last position sent by an earlier process: the step, and the index of the event's class in ``ORDER``."""

    def handle(self, event: Event) -> None:
        if not self._begun:
            self._begin()
        if isinstance(event, PracticeRound):
            self._run.log({PRACTICE: event.mean_return, "practice/round": event.round})
            return
        numbers = self.scalars.of(event)
        place = ORDER.index(type(event)) if type(event) in ORDER else 0
        position = [self.scalars.steps, place]
        if numbers and position > self._sent:
            # Not the library's own step, which must increase: practice would advance it.
            self._run.log({**numbers, STEP: self.scalars.steps})
            self._remember(position)

    def close(self) -> None:
        if self._begun and not self._users:
            self._module.finish()

    def _begin(self) -> None:
        if self.state.exists():
            state = json.loads(self.state.read_text(encoding="utf-8"))
            self._id = str(state["id"])
            self._sent = list(map(int, state["sent"]))
        if not self._users:
            self._start()
        self._begun = True
        self._remember(self._sent)

    def _start(self) -> None:
        """Starts a run, or continues the one of the state file."""
        name = self.folder.absolute().name
        identity = {"name": f"{name}-{self._id}"}  # trackio identifies runs by name
        if self.library == "wandb":  # continues the run with that id, if it exists
            identity = {"id": self._id, "name": name, "dir": str(self.folder)}
        with without_terminal():
            self._run = self._module.init(project=self.project, config=self.config, resume="allow", **identity)
        if hasattr(self._module, "define_metric"):
            self._module.define_metric("*", step_metric=STEP)
            self._module.define_metric("practice/*", step_metric="practice/round")

    def _remember(self, sent: list[int]) -> None:
        """Saves the position; the file is replaced by a rename, so that a crash leaves the old or the new one."""
        part = self.state.with_suffix(".part")
        part.write_text(json.dumps({"id": self._id, "sent": sent}), encoding="utf-8")
        part.replace(self.state)
