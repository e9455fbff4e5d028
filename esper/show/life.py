"""The life of one host as a chart: its accuracy with and without growth, and its seeds as bars."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from esper.files.atomic import write_atomic
from esper.show.chart_style import chart_style, inline_svg
from esper.show.charts import Line, draw_lanes, draw_line
from esper.show.html import figure
from esper.show.view import RunView
from esper.telemetry.event import EpisodeCompleted, EpochCompleted
from esper.telemetry.seed_history import Life
from esper.telemetry.text import clean

WIDTH = 7.0
CURVES = 2.3
LANE = 0.26
"""Width of the chart, height of its curves and of a slot, in inches."""


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
def life_chart(host: HostLife) -> str:
    """Returns the chart as an svg element: the curves above, the slots below."""
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.ticker import MaxNLocator

    epochs = len(host.grown)
    slots = host.view.slots
    lanes = max(1, len(slots))
    drawing = Figure(figsize=(WIDTH, CURVES + LANE * lanes + 0.6), layout="constrained")
    curves, seeds = drawing.subplots(2, sharex=True, height_ratios=(CURVES, LANE * lanes))
    score = host.view.score
    numbers = range(1, epochs + 1)
    draw_line(curves, Line("with growth", numbers, host.grown, 0))
    if host.alone:
        draw_line(curves, Line("hosts left alone, mean", numbers, host.alone, -1, reference=True))
    curves.set(ylim=_range(host), ylabel=score.label(f"validation {score.name}"))
    curves.set_title(clean(host.title), loc="left", fontsize=9.5)
    curves.legend(loc="best")
    places = {slot: float(place) for place, slot in enumerate(slots)}
    bars = [(s, places[s.slot]) for s in host.life.stretches if s.slot in places]
    names = {place: clean(slot, 10) for slot, place in places.items()}
    draw_lanes(seeds, names, bars, epochs, (WIDTH - 2.5) / epochs)
    seeds.set(ylim=(lanes - 0.5, -0.5), xlabel="epochs done")
    seeds.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if bars:
        seeds.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8.5)
    description = clean(f"{host.words} {host.life.words()}", 1000)
    return inline_svg(drawing, clean(host.title), description)


def _range(host: HostLife) -> tuple[float, float]:
    """Returns the scores between which curves are drawn: the steep beginning is left out, the rest fills the chart."""
    start = len(host.grown) // 6
    late = host.grown[start:] + host.alone[start:]
    low = min(late)
    high = max(late)
    margin = 0.05 * (high - low) or 1.0 / host.view.score.points
    return low - margin, high + margin


def life_figure(view: RunView) -> str:
    """Returns the chart with its caption for a page; empty if there is no such host."""
    host = best_life(view)
    if host is None:
        return ""
    words = f"{host.title}: {host.words} Each bar is a seed in its slot, coloured by stage."
    return figure("A host's life", words, f'<div class="scroll wide">{life_chart(host)}</div>', "")


def save_life(host: HostLife, folder: Path) -> None:
    """Writes the chart to the folder of the run."""
    write_atomic(folder / "life.svg", life_chart(host).encode())
