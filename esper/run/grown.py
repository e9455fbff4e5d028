"""The result of growing one host, and its reasons."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

from esper.core.units import LayerUnits
from esper.hosts.grown import GrownHost
from esper.show.charts import PAPER
from esper.show.life import HostLife, life_chart
from esper.telemetry import html
from esper.telemetry.event import EpochCompleted
from esper.telemetry.score import ACCURACY, ScoreUnit
from esper.telemetry.seed_history import TriedSeed
from esper.telemetry.text import count

WIDTH = 116

MEANING = (
    "(contribution: how much the host, as it has grown, leans on the seed; what growing won is the difference to the "
    "host alone)"
)


@dataclass(frozen=True, repr=False)
class Grown:
    """A grown host, with the same host left alone beside it; accuracies in pp, test split. Its text tells the story.

    For a task with another score, they are that score, in its unit.
    """

    network: GrownHost
    """The host with its kept seeds, on the CPU, in eval mode."""
    accuracy: float
    alone: float | None
    """Accuracy of a host with the same initial weights and batches, but no seeds; None if it was not trained to the
    end."""
    seeds: dict[str, str]
    """Blueprint of each kept seed, by slot."""
    refusals: tuple[str, ...]
    """Distinct reasons why seeds could not be planted; empty if none was refused."""
    host_parameters: int
    parameters: int
    """Number of parameters of the host and its kept seeds."""
    tried: tuple[TriedSeed, ...]
    """All seeds that were planted, in that order: how each ended, and why it was not kept."""
    history: tuple[EpochCompleted, ...]
    """The epochs of the grown host; accuracies on the validation split."""
    warnings: tuple[str, ...]
    """Signs that training diverged, and callbacks and files that failed."""
    controller: str
    epochs: int
    """Planned number of epochs; ``history`` is shorter if growing was interrupted."""
    interrupted: bool
    """Whether Ctrl-C ended it before its time."""
    folder: Path | None
    """The run folder; None if none was kept."""
    resolution: float
    """Accuracy that one sample of the validation split is worth, pp."""
    score: ScoreUnit = ACCURACY
    """Display format of the score."""
    life: HostLife | None = None
    """Its life, for a chart; None if it was interrupted."""
    layers: tuple[LayerUnits, ...] = ()
    """Layers that can be widened and have names, in the order of slots, with their units before and after."""
    reason: str = ""
    """The expectation of an advisor, in words."""

    def _repr_html_(self) -> str:
        shown = html.lines(repr(self))
        if self.life is not None:
            shown += html.picture(life_chart(self.life, PAPER).svg)
        return shown

    @property
    def gain(self) -> float | None:
        """Gain of growing over the host left alone; None if that was not trained to the end."""
        if self.alone is None:
            return None
        return self.accuracy - self.alone

    def __repr__(self) -> str:
        lines = [self._outcome()]
        if self.interrupted:
            lines.append(f"  {self._interruption()}")
        if self.reason:
            lines.append(f"  {self.reason}")
        lines += [f"  {layer}" for layer in self.layers if layer.after != layer.before]
        lines += [f"  {seed.words(self.score)}" for seed in self.tried]
        if any(seed.contribution is not None for seed in self.tried):
            lines.append(f"  {MEANING}")
        lines += [f"  not planted: {reason}" for reason in self.refusals]
        lines += [f"  hint: {hint}" for hint in self.hints()]
        lines += [f"  warning: {warning}" for warning in self.warnings]
        wrap = textwrap.TextWrapper(
            WIDTH,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        return "\n".join(map(wrap.fill, lines))

    def _outcome(self) -> str:
        added = self.parameters - self.host_parameters
        kept = "no seed"
        if self.seeds:
            places = {seed.slot: seed.path or seed.slot for seed in self.tried}
            kept = ", ".join(f"{blueprint} in {places.get(slot, slot)}" for slot, blueprint in self.seeds.items())
        score = self.score.value(self._points(self.accuracy))
        if self.score != ACCURACY:
            score = f"{self.score.name} {score}"
        return (
            f"{score} on test{self._compared()}: {self.controller} kept {kept} "
            f"({added:,} parameters added to {self.host_parameters:,}) in {count(len(self.history), 'epoch')}"
        )

    def _interruption(self) -> str:
        words = f"interrupted after {len(self.history)} of {count(self.epochs, 'epoch')}"
        if self.folder is not None:
            words += f"; the same call continues, with folder={str(self.folder)!r}"
        return words

    def _compared(self) -> str:
        if self.alone is None:
            return ""
        gain = self.score.difference(self._points(self.accuracy - self.alone))
        alone = self.score.value(self._points(self.alone))
        return f", {gain} against {alone} alone"

    def _points(self, score: float) -> float:
        """Returns a score in percentage points."""
        return score * self.score.points

    def hints(self) -> list[str]:
        """Explains why seeds that could have been kept were not."""
        hints = []
        if not self.tried and not self.refusals:
            hints.append(f"{self.controller} planted no seed in {count(len(self.history), 'epoch')}; give it more")
        late = 0
        waiting = []
        for seed in self.tried:
            if seed.kept or seed.removed:
                continue
            if seed.stage == "HOLDING":
                waiting.append(seed.contribution or 0.0)
            else:
                late += 1
        small = all(contribution < 2 * self.resolution for contribution in waiting)
        if self.score == ACCURACY and waiting and small:
            hints.append(
                f"one validation sample is worth {self.resolution:.2f} pp; seeds that are worth less cannot be told "
                "from useless ones: use a larger validation split, or a host that leaves more to gain"
            )
        if late:
            hints.append(f"{count(late, 'seed')} had not grown in when the epochs ended; train longer")
        return hints
