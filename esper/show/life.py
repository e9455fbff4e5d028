"""The lives of hosts as charts: the slots of a round, and the best host of a run with its accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from esper.files.atomic import write_atomic
from esper.show.charts import (
    CHARACTER,
    INK,
    PAPER,
    WIDTH,
    Line,
    Picture,
    chart_style,
    draw,
    draw_lanes,
    draw_line,
    picture,
)
from esper.show.view import STAGE_COLORS, RunView
from esper.telemetry.event import EpisodeCompleted, EpochCompleted
from esper.telemetry.score import ScoreUnit
from esper.telemetry.seed_history import Life, Stretch
from esper.telemetry.text import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LANES = 60
"""Max lanes in one chart of slots."""
HOST_GAP = 0.55
"""Gap between two hosts, in lanes."""
CURVES = 2.3
LANE = 0.26
"""Heights of curves and of a slot, in inches."""


@dataclass(frozen=True)
class HostLife:
    """The life of one host, with its score by epoch."""

    title: str
    words: str
    """The effect of growth on it, in a sentence."""
    life: Life
    slots: Sequence[str]
    score: ScoreUnit
    grown: Sequence[float]
    """Accuracy, or another score, of the whole host by epoch, from 1; validation split, in the unit of the score."""
    alone: Sequence[float]
    """Those of hosts left alone, or their means, at the same epochs; empty if unknown."""
    is_figure = True


def best_life(view: RunView) -> HostLife | None:
    """Returns the life of the host of a run with the best committed network, which the run has saved.

    None if no host has reported its epochs to the end, and where hosts differ: the best one would be that of the
    easiest data.
    """
    if view.hosts_differ:
        return None
    done = [episode for episode in view.of(EpisodeCompleted) if (episode.episode, episode.env) in view.lives]
    if not done:
        return None
    best = max(done, key=lambda episode: episode.committed_accuracy)
    score = view.score.while_training
    grown = []
    alone = []
    for epoch in view.of(EpochCompleted):
        if (epoch.episode, epoch.env) != (best.episode, best.env):
            continue
        grown.append(score.of(epoch.validation_accuracy))
        if view.has_baseline:
            alone.append(score.of(epoch.baseline_accuracy))
    if not grown:
        return None
    life = view.lives[best.episode, best.env]
    words = f"validation {score.name} {score.value(best.committed_accuracy, 1)}"
    if alone:
        words += f", beside {score.value(best.baseline_accuracy, 1)} of hosts left alone"
    kept = [f"{seed.blueprint} in {seed.slot}" for seed in life.seeds if seed.kept]
    return HostLife(
        title=f"The best of {len(done)} hosts (round {best.episode + 1}, host {best.env})",
        words=f"{words}; it kept {', '.join(kept) or 'no seed'}.",
        life=life,
        slots=view.slots,
        score=score,
        grown=grown,
        alone=alone,
    )


@chart_style()
def life_chart(host: HostLife, paper: str = "none") -> Picture:
    """Returns the chart on ``paper``: the curves above, the slots and the stages of their seeds below."""
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.ticker import MaxNLocator

    epochs = len(host.grown)
    slots = list(host.slots)
    lanes = max(1, len(slots))
    height = CURVES + LANE * lanes + 1.2
    drawing = Figure(figsize=(WIDTH, height), layout="constrained")
    curves, seeds = drawing.subplots(2, sharex=True, height_ratios=(CURVES, LANE * lanes))
    score = host.score
    numbers = range(1, epochs + 1)
    draw_line(curves, Line("with growth", numbers, host.grown, 0))
    if host.alone:
        draw_line(curves, Line("left alone", numbers, host.alone, -1, reference=True))
    curves.set(ylim=_range(host), ylabel=score.label(f"validation {score.name}"))
    curves.legend(loc="best")
    names: dict[float, str] = {}
    for place, slot in enumerate(slots):
        names[place] = clean(slot, 18)
    bars = [(stretch, slots.index(stretch.slot)) for stretch in host.life.stretches if stretch.slot in slots]
    draw_lanes(seeds, names, bars, epochs, (WIDTH - 1.0) / epochs)
    # The last marker lies on the last epoch.
    seeds.set(xlim=(0, 1.02 * epochs), ylim=(lanes - 0.5, -0.5), xlabel="epochs done")
    seeds.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if bars:
        handles, labels = seeds.get_legend_handles_labels()
        drawing.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8.5)
    return picture(drawing, host.title, f"{host.words} {host.life.words()}", paper)


def _range(host: HostLife) -> tuple[float, float]:
    """Returns the scores between which curves are drawn: the steep beginning is left out, the rest fills the chart."""
    start = len(host.grown) // 6
    late = [*host.grown[start:], *host.alone[start:]]
    low = min(late)
    high = max(late)
    margin = 0.05 * (high - low) or 1.0 / host.score.points
    return low - margin, high + margin


def lanes_chart(view: RunView, title: str) -> Picture:
    """Draws one lane per slot of each host of the newest round, epochs from left to right, bars coloured by stage."""
    slots = view.slots[:MAX_LANES]
    newest = max((episode for episode, _ in view.lives), default=0)
    lives = []
    for (episode, _), life in sorted(view.lives.items()):
        if episode == newest:
            lives.append(life)
    lanes_of_host = max(1, len(slots))
    most = max(1, MAX_LANES // lanes_of_host)
    lives = lives[:most]
    lanes: dict[float, str] = {}
    bars: list[tuple[Stretch, float]] = []
    rollbacks: list[tuple[int, float]] = []
    stages = set()
    longest = 1
    if view.begun is not None:
        longest = max(longest, view.begun.episode_length)
    for host, life in enumerate(lives):
        top = host * (len(slots) + HOST_GAP)
        for row, slot in enumerate(slots):
            name = slot
            if row == 0:
                name = f"host {life.env} {slot}"
            lanes[top + row] = clean(name, 18)
        for stretch in life.stretches:
            if stretch.slot in slots:
                bars.append((stretch, top + slots.index(stretch.slot)))
                stages.add(stretch.stage)
        rollbacks += [(epoch, top) for epoch in life.rollbacks]
        longest = max(longest, life.end)
    legend = [stage.lower() for stage in STAGE_COLORS if stage in stages]
    bottom = max(lanes, default=0) + 0.5

    def fill(axes: Axes) -> None:
        left = CHARACTER * max(map(len, lanes.values()), default=0)
        room = WIDTH - left - 0.4
        draw_lanes(axes, lanes, bars, longest, room / longest)
        for epoch, top in rollbacks:
            begin = top - 0.5
            end = begin + len(slots)
            axes.plot([epoch, epoch], [begin, end], ":", color=INK, linewidth=1.4)
        axes.tick_params(axis="y", length=0, labelsize=8.5)
        axes.set(ylim=(bottom, -0.5), xlabel="epochs done")

    return draw(title, "; ".join(map(Life.words, lives)), 0.8 * LANE * (bottom + 0.5), legend, fill)


def save_life(host: HostLife, folder: Path) -> None:
    """Writes the chart to the folder of the run."""
    write_atomic(folder / "life.svg", life_chart(host, PAPER).svg)
