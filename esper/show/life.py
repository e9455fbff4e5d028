"""The life of one host: its accuracy with and without growth, and its seeds as bars; as a chart and for a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from esper.files.atomic import write_atomic
from esper.show.chart_style import PALETTE, REFERENCE, chart_style, inline_svg
from esper.show.charts import draw_seeds
from esper.show.html import figure
from esper.show.read import Run
from esper.show.stages import STAGE_COLORS, STAGE_WORDS
from esper.telemetry.event import EpisodeCompleted, EpochCompleted
from esper.telemetry.score import ScoreUnit
from esper.telemetry.seed_history import Life, Stretch
from esper.telemetry.text import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 7.0
CURVES = 2.3
LANE = 0.26
"""Width of the chart, height of its curves and of a slot, in inches."""
ROWS = 8
"""Lines of the curves in a terminal."""
GROWN = f"bold {PALETTE[0]}"
"""Style of the curve of the grown host in a terminal."""


@dataclass(frozen=True)
class HostLife:
    """The host of a run with the best committed network, which the run has saved."""

    life: Life
    slots: list[str]
    grown: list[float]
    """Accuracy, or another score, of the whole host by epoch, from 1; validation split, in the unit of the score."""
    alone: list[float]
    """The mean of hosts left alone at the same epochs; empty if unknown."""
    committed: float
    """Of the host with the seeds that were kept, after its last epoch; in pp."""
    baseline: float
    hosts: int
    """Number of hosts of the run that it is the best of."""
    score: ScoreUnit

    @property
    def title(self) -> str:
        return f"The best of {self.hosts} hosts (round {self.life.episode + 1}, host {self.life.env})"

    @property
    def words(self) -> str:
        """The effect of growth on it, in a sentence."""
        words = f"validation {self.score.name} {self.score.value(self.committed, 1)}"
        if self.alone:
            words += f", beside {self.score.value(self.baseline, 1)} of hosts left alone"
        kept = [f"{s.blueprint} in {s.slot}" for s in self.life.stretches if s.stage == "FOSSILIZED"]
        return f"{words}; it kept {', '.join(kept) or 'no seed'}."


def best_life(run: Run) -> HostLife | None:
    """Returns the life of the best host; None if no host has reported its epochs to the end."""
    epochs: dict[tuple[int, int], list[EpochCompleted]] = defaultdict(list)
    for epoch in run.of(EpochCompleted):
        epochs[epoch.episode, epoch.env].append(epoch)
    done = [episode for episode in run.of(EpisodeCompleted) if (episode.episode, episode.env) in epochs]
    if not done:
        return None
    best = max(done, key=lambda episode: episode.committed_accuracy)
    host = (best.episode, best.env)
    score = run.view.score
    grown = []
    alone = []
    for epoch in epochs[host]:
        grown.append(score.of(epoch.validation_accuracy))
        if run.view.alone is not None:
            alone.append(score.of(epoch.baseline_accuracy))
    return HostLife(
        life=run.lives[host],
        slots=run.slots,
        grown=grown,
        alone=alone,
        committed=best.committed_accuracy,
        baseline=best.baseline_accuracy,
        hosts=len(done),
        score=score,
    )


@chart_style()
def life_chart(host: HostLife) -> str:
    """Returns the chart as an svg element: the curves above, the slots below."""
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.ticker import MaxNLocator

    epochs = len(host.grown)
    lanes = max(1, len(host.slots))
    lanes_height = LANE * lanes
    height = CURVES + lanes_height + 1.1
    left = 0.9 / WIDTH
    right = 1 - 1.9 / WIDTH
    bottom = 0.45 / height
    width = right - left
    drawing = Figure(figsize=(WIDTH, height))
    seeds = drawing.add_axes((left, bottom, width, lanes_height / height))
    curves = drawing.add_axes((left, bottom + (lanes_height + 0.12) / height, width, CURVES / height))
    _draw_curves(curves, host)
    places = {slot: float(place) for place, slot in enumerate(host.slots)}
    bars = [(s, places[s.slot]) for s in host.life.stretches if s.slot in places]
    seeds.barh(list(places.values()), epochs, height=0.86, color="#f4f4f4")
    draw_seeds(seeds, bars, WIDTH * width / max(1, epochs))
    seeds.set(xlim=(0, epochs), ylim=(lanes - 0.5, -0.5), xlabel="epochs done")
    seeds.set_yticks(list(places.values()), [clean(slot, 10) for slot in host.slots])
    seeds.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    seeds.grid(visible=False, axis="y")
    if bars:
        top = 1.6 if lanes < 4 else 1.1
        seeds.legend(loc="upper left", bbox_to_anchor=(1.01, top), fontsize=8.5)
    description = clean(f"{host.words} {host.life.words()}", 1000)
    return inline_svg(drawing, clean(host.title), description)


def _draw_curves(axes: Axes, host: HostLife) -> None:
    epochs = range(1, len(host.grown) + 1)
    axes.plot(
        epochs,
        host.grown,
        color=PALETTE[0],
        linewidth=1.9,
        label="with growth",
    )
    if host.alone:
        axes.plot(
            epochs,
            host.alone,
            "--",
            color=REFERENCE,
            linewidth=1.6,
            label="hosts left alone, mean",
        )
    axes.set(
        xlim=(0, len(host.grown)),
        ylim=_range(host),
        ylabel=host.score.label(f"validation {host.score.name}"),
    )
    axes.set_title(clean(host.title), loc="left", fontsize=9.5)
    axes.legend(loc="best")
    axes.tick_params(labelbottom=False)


def _range(host: HostLife) -> tuple[float, float]:
    """Returns the scores between which curves are drawn: the steep beginning is left out, the rest fills the chart."""
    start = len(host.grown) // 6
    late = host.grown[start:] + host.alone[start:]
    low = min(late)
    high = max(late)
    margin = 0.05 * (high - low) or 1.0 / host.score.points
    return low - margin, high + margin


def life_figure(run: Run) -> str:
    """Returns the chart with its caption for a page; empty if there is no such host."""
    host = best_life(run)
    if host is None:
        return ""
    words = f"{host.title}: {host.words} Each bar is a seed in its slot, coloured by stage."
    return figure("A host's life", words, f'<div class="scroll wide">{life_chart(host)}</div>', "")


def save_life(host: HostLife, folder: Path) -> None:
    """Writes the chart to the folder of the run."""
    write_atomic(folder / "life.svg", life_chart(host).encode())


def life_lines(host: HostLife, width: int) -> list[Text]:
    """Draws the life in at most ``width`` columns: curves as points, then a lane per slot with letters of stages."""
    epochs = len(host.grown)
    room = max(10, min(width - 12, 2 * epochs))
    places = [min(epochs - 1, column * epochs // room) for column in range(room)]
    low, high = _range(host)
    edges = {ROWS - 1: high, 0: low}
    grown = _heights(host.grown, places, low, high)
    alone = _heights(host.alone, places, low, high)
    lines = [Text(f"{host.title}: {host.words}")]
    for row in reversed(range(ROWS)):
        edge = ""
        if row in edges:
            edge = host.score.value(host.score.points * edges[row], 0)
        line = Text(f"{edge:>8s} |")
        for column in range(room):
            if grown[column] == row:
                line.append("*", GROWN)
            elif alone and alone[column] == row:
                line.append(".", REFERENCE)
            else:
                line.append(" ")
        lines.append(line)
    stretches = [s for s in host.life.stretches if s.stage in STAGE_WORDS]
    stages = dict.fromkeys(s.stage for s in stretches)
    lines += [_lane(slot, stretches, places) for slot in host.slots]
    lines.append(Text(f"{'epoch':>8s}  1{epochs:>{room - 1}d}"))
    key = Text(" " * 10)
    key.append("*", GROWN).append(" grown ")
    key.append(".", REFERENCE).append(" left alone")
    for stage in stages:
        key.append(" ")
        _append_letter(key, stage)
        key.append(f" {STAGE_WORDS[stage]}")
    lines.append(key)
    return lines


def _heights(curve: Sequence[float], places: Sequence[int], low: float, high: float) -> list[int]:
    """Returns the row of the curve in each column, -1 below the chart; [] without a curve."""
    if not curve:
        return []
    step = (high - low) / ROWS
    rows = []
    for place in places:
        row = -1
        if curve[place] >= low:
            row = min(ROWS - 1, int((curve[place] - low) // step))
        rows.append(row)
    return rows


def _lane(slot: str, stretches: Sequence[Stretch], places: Sequence[int]) -> Text:
    line = Text(f"{clean(slot, 8):>8s} |")
    for place in places:
        stage = ""
        for s in stretches:
            if s.slot == slot and s.begin <= place < s.end:
                stage = s.stage
        if stage:
            _append_letter(line, stage)
        else:
            line.append(" ")
    return line


def _append_letter(line: Text, stage: str) -> None:
    line.append(STAGE_WORDS[stage][0].upper(), f"black on {STAGE_COLORS[stage]}")
