"""The life of one host: its accuracy with and without growth, and its seeds as bars; as a chart and for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from esper.files.atomic import write_atomic
from esper.report.chart_style import PALETTE, REFERENCE, chart_style, inline_svg
from esper.report.charts import draw_seeds
from esper.report.html import figure
from esper.report.read import Run
from esper.telemetry.event import EpisodeCompleted, EpochCompleted
from esper.telemetry.score import ScoreUnit
from esper.telemetry.seed_history import Life, Stretch
from esper.telemetry.stages import STAGE_COLORS, STAGE_WORDS
from esper.telemetry.text import clean, shorten

WIDTH, CURVES, LANE = 7.0, 2.3, 0.26
"""Width of the chart, height of its curves and of a slot, in inches."""
ROWS = 8
"""Lines of the curves in a terminal."""


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
        alone = f", beside {self.score.value(self.baseline, 1)} of hosts left alone" if self.alone else ""
        kept = [f"{s.blueprint} in {s.slot}" for s in self.life.stretches if s.stage == "FOSSILIZED"]
        seeds = f"it kept {', '.join(kept)}" if kept else "it kept no seed"
        return f"validation {self.score.name} {self.score.value(self.committed, 1)}{alone}; {seeds}."


def best_life(run: Run) -> HostLife | None:
    """Returns the life of the best host; None if no host has reported its epochs to the end."""
    done = run.of(EpisodeCompleted)
    epochs = {(e.episode, e.env) for e in run.of(EpochCompleted)}
    done = [episode for episode in done if (episode.episode, episode.env) in epochs]
    if not done:
        return None
    best, score = max(done, key=lambda episode: episode.committed_accuracy), run.view.score
    own = [e for e in run.of(EpochCompleted) if (e.episode, e.env) == (best.episode, best.env)]
    known = run.view.alone is not None
    return HostLife(
        run.lives[best.episode, best.env],
        run.slots,
        [score.of(e.validation_accuracy) for e in own],
        [score.of(e.baseline_accuracy) for e in own] if known else [],
        best.committed_accuracy,
        best.baseline_accuracy,
        len(done),
        score,
    )


@chart_style()
def life_chart(host: HostLife) -> str:
    """Returns the chart as an svg element: the curves above, the slots below."""
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.ticker import MaxNLocator

    lanes = max(1, len(host.slots))
    height = CURVES + LANE * lanes + 1.1
    drawing = Figure(figsize=(WIDTH, height))
    left, right, bottom = 0.9 / WIDTH, 1 - 1.9 / WIDTH, 0.45 / height
    seeds = drawing.add_axes((left, bottom, right - left, LANE * lanes / height))
    curves = drawing.add_axes((left, bottom + (LANE * lanes + 0.12) / height, right - left, CURVES / height))
    epochs = range(1, len(host.grown) + 1)
    curves.plot(epochs, host.grown, color=PALETTE[0], linewidth=1.9, label="with growth")
    if host.alone:
        curves.plot(epochs, host.alone, "--", color=REFERENCE, linewidth=1.6, label="hosts left alone, mean")
    low, high = _range(host)
    curves.set(xlim=(0, len(host.grown)), ylim=(low, high), ylabel=host.score.label(f"validation {host.score.name}"))
    curves.set_title(clean(host.title), loc="left", fontsize=9.5)
    curves.legend(loc="best")
    curves.tick_params(labelbottom=False)
    places = {slot: float(place) for place, slot in enumerate(host.slots)}
    bars = [(s, places[s.slot]) for s in host.life.stretches if s.slot in places]
    seeds.barh(list(places.values()), len(host.grown), height=0.86, color="#f4f4f4")
    draw_seeds(seeds, bars, WIDTH * (right - left) / max(1, len(host.grown)))
    seeds.set(xlim=(0, len(host.grown)), ylim=(lanes - 0.5, -0.5), xlabel="epochs done")
    seeds.set_yticks(list(places.values()), [shorten(clean(slot), 10) for slot in host.slots])
    seeds.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    seeds.grid(visible=False, axis="y")
    if bars:
        seeds.legend(loc="upper left", bbox_to_anchor=(1.01, 1.6 if lanes < 4 else 1.1), fontsize=8.5)
    return inline_svg(drawing, clean(host.title), clean(f"{host.words} {host.life.words()}", 1000))


def _range(host: HostLife) -> tuple[float, float]:
    """Returns the scores between which curves are drawn: the steep beginning is left out, the rest fills the chart."""
    curves = [host.grown, host.alone] if host.alone else [host.grown]
    start = len(host.grown) // 6
    late = [value for curve in curves for value in curve[start:]]
    margin = 0.05 * (max(late) - min(late)) or 1.0 / host.score.points
    return min(late) - margin, max(late) + margin


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
    lines = [Text(f"{host.title}: {host.words}")]
    grown, alone = (_heights(curve, places, low, high) for curve in (host.grown, host.alone))
    for row in range(ROWS - 1, -1, -1):
        edge = {ROWS - 1: high, 0: low}.get(row)
        line = Text(f"{'' if edge is None else host.score.value(host.score.points * edge, 0):>8s} |")
        for column in range(room):
            if grown[column] == row:
                line.append("*", "bold #0072b2")
            elif alone and alone[column] == row:
                line.append(".", REFERENCE)
            else:
                line.append(" ")
        lines.append(line)
    lines += [_lane(slot, [s for s in host.life.stretches if s.slot == slot], places) for slot in host.slots]
    lines.append(Text(f"{'epoch':>8s}  1{epochs:>{room - 1}d}"))
    key = Text(" " * 10).append("*", "bold #0072b2").append(" grown ").append(".", REFERENCE).append(" left alone")
    for stage in dict.fromkeys(s.stage for s in host.life.stretches if s.stage in STAGE_WORDS):
        key.append(" ").append(STAGE_WORDS[stage][0].upper(), f"black on {STAGE_COLORS[stage]}")
        key.append(f" {STAGE_WORDS[stage]}")
    return [*lines, key]


def _heights(curve: Sequence[float], places: Sequence[int], low: float, high: float) -> list[int]:
    """Returns the row of the curve in each column; -1 below the chart."""
    step = (high - low) / ROWS
    values = [curve[place] for place in places] if curve else []
    return [min(ROWS - 1, int((value - low) // step)) if value >= low else -1 for value in values]


def _lane(slot: str, stretches: Sequence[Stretch], places: Sequence[int]) -> Text:
    line = Text(f"{shorten(clean(slot), 8):>8s} |")
    for place in places:
        here = [s for s in stretches if s.begin <= place < s.end and s.stage in STAGE_WORDS]
        if here:
            line.append(STAGE_WORDS[here[-1].stage][0].upper(), f"black on {STAGE_COLORS[here[-1].stage]}")
        else:
            line.append(" ")
    return line
