"""The lives of hosts as charts: the slots of a round, and the best host of a run with its accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from esper.files.atomic import write_atomic
from esper.show.charts import CHARACTER, INK, Line, chart_style, draw, draw_lanes, draw_line, inline_svg
from esper.show.view import STAGE_COLORS, RunView
from esper.telemetry.event import EpisodeCompleted, EpochCompleted
from esper.telemetry.seed_history import Life, Stretch
from esper.telemetry.text import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LANES = 60
"""Max lanes in one chart of slots."""
HOST_GAP = 0.55
"""Gap between two hosts, in lanes."""
WIDE = 7.0
NARROW = 4.0
CURVES = 2.3
LANE = 0.26
"""Widths of the chart as a picture and on a page, height of its curves and of a slot, in inches."""


@dataclass(frozen=True)
class HostLife:
    """The host of a run with the best committed network, which the run has saved."""

    view: RunView
    episode: EpisodeCompleted
    hosts: int
    """Number of hosts of the run that it is the best of."""
    grown: list[float]
    """Accuracy, or another score, of the whole host by epoch, from 1; validation split, in the unit of the score."""
    alone: list[float]
    """The mean of hosts left alone at the same epochs; empty if unknown."""
    is_figure = True

    @property
    def life(self) -> Life:
        return self.view.lives[self.episode.episode, self.episode.env]

    @property
    def title(self) -> str:
        return f"The best of {self.hosts} hosts (round {self.episode.episode + 1}, host {self.episode.env})"

    @property
    def words(self) -> str:
        """The effect of growth on it, in a sentence."""
        score = self.view.score
        words = f"validation {score.name} {score.value(self.episode.committed_accuracy, 1)}"
        if self.alone:
            words += f", beside {score.value(self.episode.baseline_accuracy, 1)} of hosts left alone"
        kept = [f"{seed.blueprint} in {seed.slot}" for seed in self.life.seeds if seed.kept]
        return f"{words}; it kept {', '.join(kept) or 'no seed'}."


def best_life(view: RunView) -> HostLife | None:
    """Returns the life of the best host; None if no host has reported its epochs to the end."""
    done = [episode for episode in view.of(EpisodeCompleted) if (episode.episode, episode.env) in view.lives]
    if not done:
        return None
    best = max(done, key=lambda episode: episode.committed_accuracy)
    epochs = [e for e in view.of(EpochCompleted) if (e.episode, e.env) == (best.episode, best.env)]
    if not epochs:
        return None
    grown = [view.score.of(epoch.validation_accuracy) for epoch in epochs]
    alone = []
    if view.has_baseline:
        alone = [view.score.of(epoch.baseline_accuracy) for epoch in epochs]
    return HostLife(view, best, len(done), grown, alone)


@chart_style()
def life_chart(host: HostLife, width: float = NARROW) -> str:
    """Returns the chart as an svg element, ``width`` inches wide: the curves above, the slots below.

    A narrow chart follows the colours of its page; a wide one is a picture of its own, with the stages on its right.
    """
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.ticker import MaxNLocator

    narrow = width == NARROW
    epochs = len(host.grown)
    slots = host.view.slots
    lanes = max(1, len(slots))
    height = CURVES + LANE * lanes + (1.2 if narrow else 0.6)
    drawing = Figure(figsize=(width, height), layout="constrained")
    curves, seeds = drawing.subplots(2, sharex=True, height_ratios=(CURVES, LANE * lanes))
    score = host.view.score
    numbers = range(1, epochs + 1)
    draw_line(curves, Line("with growth", numbers, host.grown, 0))
    if host.alone:
        draw_line(curves, Line("hosts left alone, mean", numbers, host.alone, -1, reference=True))
    curves.set(ylim=_range(host), ylabel=score.label(f"validation {score.name}"))
    curves.legend(loc="best")
    places = {slot: float(place) for place, slot in enumerate(slots)}
    bars = [(s, places[s.slot]) for s in host.life.stretches if s.slot in places]
    names = {place: clean(slot, 10) for slot, place in places.items()}
    beside = 1.0 if narrow else 2.5
    draw_lanes(seeds, names, bars, epochs, (width - beside) / epochs)
    seeds.set(ylim=(lanes - 0.5, -0.5), xlabel="epochs done")
    seeds.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if not narrow:
        curves.set_title(clean(host.title), loc="left", fontsize=9.5)
    if bars and narrow:
        handles, labels = seeds.get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8.5)
    elif bars:
        seeds.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
    description = clean(f"{host.words} {host.life.words()}", 1000)
    return inline_svg(drawing, clean(host.title), description, follows_page=narrow)


def _range(host: HostLife) -> tuple[float, float]:
    """Returns the scores between which curves are drawn: the steep beginning is left out, the rest fills the chart."""
    start = len(host.grown) // 6
    late = host.grown[start:] + host.alone[start:]
    low = min(late)
    high = max(late)
    margin = 0.05 * (high - low) or 1.0 / host.view.score.points
    return low - margin, high + margin


def lanes_chart(view: RunView, title: str) -> str:
    """Draws one lane per slot of each host of the newest round, epochs from left to right, bars coloured by stage."""
    slots = view.slots[:MAX_LANES]
    newest = max((episode for episode, _ in view.lives), default=0)
    lives = [life for (episode, _), life in sorted(view.lives.items()) if episode == newest]
    lives = lives[: max(1, MAX_LANES // max(1, len(slots)))]
    lanes: dict[float, str] = {}
    bars: list[tuple[Stretch, float]] = []
    rollbacks: list[tuple[int, float]] = []
    for host, life in enumerate(lives):
        top = host * (len(slots) + HOST_GAP)
        for row, slot in enumerate(slots):
            name = slot if row else f"host {life.env} {slot}"
            lanes[top + row] = clean(name, 18)
        bars += [(s, top + slots.index(s.slot)) for s in life.stretches if s.slot in slots]
        rollbacks += [(epoch, top) for epoch in life.rollbacks]
    stages = {stretch.stage for stretch, _ in bars}
    legend = [stage.lower() for stage in STAGE_COLORS if stage in stages]
    longest = max(1, *(life.end for life in lives), view.begun.episode_length if view.begun else 1)
    bottom = max(lanes, default=0) + 0.5

    def fill(axes: Axes) -> None:
        left = CHARACTER * max(map(len, lanes.values()), default=0)
        draw_lanes(axes, lanes, bars, longest, (NARROW - left - 0.4) / longest)
        for epoch, top in rollbacks:
            axes.plot([epoch, epoch], [top - 0.5, top + len(slots) - 0.5], ":", color=INK, linewidth=1.4)
        axes.tick_params(axis="y", length=0, labelsize=8.5)
        axes.set(ylim=(bottom, -0.5), xlabel="epochs done")

    return draw(title, "; ".join(map(Life.words, lives)), 0.8 * LANE * (bottom + 0.5), legend, fill)


def save_life(host: HostLife, folder: Path) -> None:
    """Writes the chart to the folder of the run."""
    write_atomic(folder / "life.svg", life_chart(host, WIDE).encode())
