"""TensorBoard sink."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.telemetry.event import Event, PracticeRound, RoundCompleted
from esper.telemetry.sinks.scalars import KINDS, PRACTICE, Scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink:
    """Writes event files to ``folder``, starting with the first event; flushes them after every round.

    Practice is written to the subfolder ``practice``, because it has its own steps.

    Args:
        folder: created when the first event arrives.
        steps: env steps done before. For a resumed run, anything written beyond them is purged: the run writes it
            again, and no step is shown twice.
        resumed: whether there may be such steps.
        config: shown as the text ``config``.
    """

    wants = KINDS

    def __init__(self, folder: str | Path, steps: int = 0, resumed: bool = False, config: str = "") -> None:
        self.folder = Path(folder)
        self.resumed = resumed
        self.config = config
        self.scalars = Scalars(steps)
        self._writers: dict[str, SummaryWriter] = {}

    def handle(self, event: Event) -> None:
        if isinstance(event, PracticeRound):
            self._writer("practice").add_scalar(PRACTICE, event.mean_return, event.round)
            return
        writer = self._writer("")
        for tag, value in self.scalars.of(event).items():
            writer.add_scalar(tag, value, self.scalars.steps)
        if isinstance(event, RoundCompleted):
            for open_writer in self._writers.values():
                open_writer.flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, below: str) -> Any:
        """Returns the writer to the subfolder ``below``, which is opened when it is first needed."""
        if below in self._writers:
            return self._writers[below]
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and few runs need it

        folder = self.folder / below
        # Later steps were written by the interrupted run.
        purge = self.scalars.steps + 1 if self.resumed and not below else None
        _wait_for_a_later_name(folder)
        writer = SummaryWriter(str(folder), purge_step=purge)
        self._writers[below] = writer
        if self.config and not self.resumed and not below:
            indented = self.config.replace("\n", "\n    ")  # verbatim in Markdown
            writer.add_text("config", f"    {indented}", 0)
        return writer


def _wait_for_a_later_name(folder: Path) -> None:
    """Waits until a new event file would sort after the existing ones.

    Readers sort a folder's files by name, which begins with the second of their creation. A run that resumes within the
    same second waits for the next, or its file might sort first.
    """
    newest = max((file.name.split(".")[3:4] for file in folder.glob("events.out.tfevents.*")), default=[])
    while newest and str(int(time.time())) == newest[0]:
        time.sleep(0.05)
