"""Trackers, which show the scalars of a run: TensorBoard, and an active run of wandb or trackio.

Names of scalars under ``charts/`` and ``losses/`` are CleanRL's; a step is one epoch of one host, as it is one step of
one env there. All values of a round belong to the step at which the round ended.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.telemetry.event import (
    AnomalyDetected,
    EpisodeCompleted,
    EpochCompleted,
    Event,
    PolicyUpdated,
    RanksWaited,
    RoundCompleted,
    RunCompleted,
)
from esper.telemetry.sink import Sink

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TAGS: dict[type[Event], tuple[str, ...]] = {
    PolicyUpdated: (
        "losses/policy_loss",
        "losses/value_loss",
        "losses/entropy",
        "losses/approx_kl",
        "losses/explained_variance",
        "ppo/gradient_norm",
        "ppo/entropy_coefficient",
        "ppo/reward_scale",
        "ppo/minibatches",
        "ppo/skipped_minibatches",
        "ppo/ratio_max",
        "ppo/ratio_min",
        "charts/learning_rate",
        "losses/clipfrac",
    ),
    RoundCompleted: (
        "esper/committed_accuracy",
        "esper/baseline_accuracy",
        "esper/test_accuracy",
        "esper/alone_test_accuracy",
        "esper/fossils",
        "esper/rollbacks",
        "esper/illegal_actions",
        "esper/images_per_second",
        "charts/episodic_return",
        "charts/SPS",
    ),
}
"""Tags of an event's fields; the last part is the name of the field, unless it is renamed."""
RENAMED = {
    "losses/clipfrac": "clip_fraction",
    "charts/episodic_return": "mean_return",
    "charts/SPS": "epochs_per_second",
}
"""Fields of the other tags."""


class Scalars:
    """Converts events to scalars; ``steps`` is the number of env steps done before the first event.

    Need and the statistics of gradients are means over the epochs and hosts of a round, accuracy by class over hosts.
    """

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps
        self._epochs: dict[str, list[float]] = defaultdict(list)
        """Values of this round's epochs, by tag."""
        self._cut_short = False
        """Whether rounds remain: the comparison of such a run is not final."""

    def of(self, event: Event) -> dict[str, float]:
        """Returns the scalars of ``event`` by tag, at step ``self.steps``."""
        match event:
            case EpochCompleted():
                for slot, need in event.needs.items():
                    self._epochs[f"need/{slot}"].append(need)
                for owner, statistics in event.gradients.items():
                    for name, value in statistics.items():
                        self._epochs[f"gradient_{name}/{owner}"].append(value)
            case EpisodeCompleted():
                for number, accuracy in enumerate(event.class_accuracy):
                    if not math.isnan(accuracy):
                        self._epochs[f"class_accuracy/{number}"].append(accuracy)
            case RoundCompleted():
                self.steps += event.epochs
                self._cut_short = event.round < event.rounds
                scalars = _fields(event)
                if event.episodes:
                    scalars["charts/episodic_length"] = event.epochs / event.episodes
                for phase, seconds in event.phase_seconds.items():
                    scalars[f"seconds/{phase}"] = seconds
                for name, held in event.memory.items():
                    scalars[f"memory/{name}"] = float(held)
                for tag, values in self._epochs.items():
                    scalars[tag] = sum(values) / len(values)
                self._epochs.clear()
                return scalars
            case PolicyUpdated():
                scalars = _fields(event)
                for head, entropy in event.choice_entropies.items():
                    scalars[f"entropy/{head}"] = entropy
                return scalars
            case RanksWaited() if event.seconds:
                return {f"ranks/waited_{rank}": share / event.seconds for rank, share in enumerate(event.waited)}
            case AnomalyDetected():
                return {f"anomaly/{event.kind}": event.measured}
            case RunCompleted() if not self._cut_short:
                return {f"comparison/against_{c.reference}": c.difference for c in event.comparisons}
        return {}


def _fields(event: RoundCompleted | PolicyUpdated) -> dict[str, float]:
    """Returns the measured values by tag; fields that are None are left out."""
    scalars = {}
    for tag in TAGS[type(event)]:
        _, _, name = tag.partition("/")
        value = getattr(event, RENAMED.get(tag, name))
        if value is not None:  # not measured, or not in an older log
            scalars[tag] = float(value)
    return scalars


class TensorBoardSink(Sink):
    """Writes event files to ``folder``, starting with the first event; flushes them after every round.

    Args:
        folder: created when the first event arrives.
        steps: env steps done before. For a resumed run, anything written beyond them is purged: the run writes it
            again, and no step is shown twice.
        resumed: whether there may be such steps.
        config: shown as the text ``config``.
    """

    def __init__(self, folder: str | Path, steps: int = 0, resumed: bool = False, config: str = "") -> None:
        self.folder = Path(folder)
        self.resumed = resumed
        self.config = config
        self.scalars = Scalars(steps)
        self._open: SummaryWriter | None = None

    def handle(self, event: Event) -> None:
        writer = self._writer()
        for tag, value in self.scalars.of(event).items():
            writer.add_scalar(tag, value, self.scalars.steps)
        if isinstance(event, RoundCompleted):
            writer.flush()

    def close(self) -> None:
        if self._open is not None:
            self._open.close()

    def _writer(self) -> Any:
        """Returns the writer, which is opened when it is first needed."""
        if self._open is not None:
            return self._open
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and few runs need it

        # Later steps were written by the interrupted run.
        purge = self.scalars.steps + 1 if self.resumed else None
        _wait_for_a_later_name(self.folder)
        writer = SummaryWriter(str(self.folder), purge_step=purge)
        self._open = writer
        if self.config and not self.resumed:
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


class ActiveRunSink(Sink):
    """Logs scalars to the run of wandb or trackio that is active when the sink is made, and never finishes that run.

    Args:
        library: ``wandb`` or ``trackio``.
        steps: env steps done before the first event.

    Raises:
        ValueError: ``library`` has no active run.
    """

    def __init__(self, library: str, steps: int = 0) -> None:
        self._run = active_run(library)
        if self._run is None:
            raise ValueError(f"no run of {library} is active: call {library}.init() first")
        self.scalars = Scalars(steps)

    def handle(self, event: Event) -> None:
        scalars = self.scalars.of(event)
        if scalars:
            # Not the library's own step, which counts the calls.
            self._run.log({**scalars, "global_step": self.scalars.steps})


def active_run(library: str) -> Any:
    """Returns the run of wandb or trackio that is active in this thread; None without one."""
    module: Any = sys.modules.get(library)  # which no active run has left out
    if hasattr(module, "context_vars"):  # trackio
        return module.context_vars.current_run.get()
    return getattr(module, "run", None)
