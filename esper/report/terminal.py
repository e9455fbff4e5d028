"""The short form: the status of a run as a screenful of plain lines."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Sequence

from esper.report.cost import shares
from esper.report.read import Run
from esper.report.svg import drawable
from esper.report.text import clean, number
from esper.telemetry.event import (
    ActionTaken,
    ArmPlayed,
    BaselineMeasured,
    EpochCompleted,
    Event,
    GovernorRollback,
    PolicyUpdated,
    PracticeRound,
    RoundCompleted,
    RunCompleted,
    SeedCut,
    StageChanged,
)
from esper.telemetry.memory import memory_words
from esper.telemetry.sinks.console import accuracies, duration

HEADS = 13
LAST_EVENTS = 5
MAX_BLUEPRINTS = 8
MAX_HOSTS = 16
LONGEST_LINE = 500
LIVING = ("GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED")


def short_form(run: Run, width: int | None = None) -> str:
    """Returns the status; lines longer than ``width`` wrap, indented. The text contains no terminal control codes."""
    lines = []
    for head, words in (
        ("run", _what(run)),
        ("state", [run.state_words(), *_pace(run)]),
        ("accuracy", _accuracy(run)),
        ("verdict", _verdict(run)),
        ("slots", _slots(run, width)),
        ("blueprints", _blueprints(run)),
        ("policy", _policy(run)),
        ("warnings", _warnings(run)),
        ("time", _time(run)),
        ("memory", _memory(run)),
        ("last events", _last_events(run)),
        ("problems", run.all_problems()),
    ):
        for place, told in enumerate(words):
            line = f"{head if not place else '':{HEADS}s}{clean(told, LONGEST_LINE)}".rstrip()
            lines += _folded(line, width)
    return "\n".join(lines)


def _folded(line: str, width: int | None) -> list[str]:
    if width is None or len(line) <= width:
        return [line]
    return textwrap.wrap(line, max(width, 2 * HEADS), subsequent_indent=" " * HEADS, drop_whitespace=True)


def _what(run: Run) -> list[str]:
    started = run.started
    if started is None:
        told = [f"{name} {run.value(*place)}" for name, place in _PLACES.items() if run.value(*place) is not None]
        return [str(run.folder), ", ".join(told) or "its start was not logged and it has no config.toml"]
    return [
        str(run.folder),
        f"task {started.task}, controller {started.controller}, seed {started.seed}, {started.n_envs} hosts of "
        f"{started.host_parameters:,} parameters, {started.episode_length} epochs each",
    ]


_PLACES = {"task": ("task", "name"), "controller": ("run", "controller"), "seed": ("run", "seed")}


def newest(run: Run) -> list[EpochCompleted]:
    """Returns the last epoch of every host in the newest round."""
    epochs = run.of(EpochCompleted)
    if not epochs:
        return []
    round_ = epochs[-1].episode
    found: dict[int, EpochCompleted] = {}
    for epoch in reversed(epochs):
        if epoch.episode != round_:
            break
        found.setdefault(epoch.env, epoch)
    return [found[env] for env in sorted(found)]


def part_of_round(run: Run) -> float:
    """Returns how much of the current round is done, 0 to 1."""
    started, epochs = run.started, newest(run)
    if started is None or not epochs or epochs[0].episode < run.done:
        return 0.0
    whole = started.n_envs * started.episode_length
    return min(1.0, sum(epoch.epoch for epoch in epochs) / whole) if whole > 0 else 0.0


def _pace(run: Run) -> list[str]:
    """Describes the position within the round, the rate, and the time left, as far as they are known."""
    if run.finished:
        completed = run.last(RunCompleted)
        return [f"took {_duration(completed.seconds)}"] if completed else []
    words = []
    epochs = newest(run)
    if epochs and epochs[0].episode >= run.done:
        words.append(f"round {run.done + 1}, epoch {max(e.epoch for e in epochs)}")
    practice = run.last(PracticeRound)
    if practice and not run.of(EpochCompleted):
        words.append(f"practice on simulated hosts, round {practice.round} of {practice.rounds}")
    arm = run.last(ArmPlayed)
    if arm and run.done >= run.rounds:
        words.append(f"comparing: {arm.controller}, round {arm.round} of {arm.rounds}")
    last = run.last(RoundCompleted)
    if last is not None:
        rate, unit = (last.images_per_second, "images/s") if last.samples else (last.epochs_per_second, "epochs/s")
        words.append(f"{number(rate, 0)} {unit}")
    left = seconds_left(run)
    if left is not None and run.state() != "interrupted" and run.done < run.rounds:
        words.append(f"about {_duration(left)} left for the rounds")
    return [", ".join(words)] if words else []


def seconds_left(run: Run) -> float | None:
    """Returns the mean seconds of a round times the number of remaining rounds; None before a round is done."""
    seconds = [event.seconds for event in run.of(RoundCompleted) if drawable(event.seconds)]
    if not seconds:
        return None
    return max(0.0, run.rounds - run.done - part_of_round(run)) * sum(seconds) / len(seconds)


def _duration(seconds: float) -> str:
    return duration(seconds) if math.isfinite(seconds) and 0 <= seconds < 1e9 else number(seconds, 0, "s")


def _accuracy(run: Run) -> list[str]:
    lines = []
    epochs = newest(run)
    if epochs and epochs[0].episode >= run.done:
        here, there = (
            sum(getattr(e, name) for e in epochs) / len(epochs) for name in ("validation_accuracy", "baseline_accuracy")
        )
        lines.append(
            f"this round, epoch {max(e.epoch for e in epochs)}: {number(here, 1)} %, baseline {number(there, 1)} % "
            f"({number(here - there, 1, sign=True)} pp)"
        )
    last, baseline = run.last(RoundCompleted), run.last(BaselineMeasured)
    if last is not None:
        lines.append(f"round {last.round}: {accuracies(last)}, {number(last.fossils, 1)} fossils per host")
    if not lines and baseline is not None and baseline.accuracy:
        lines.append(f"baseline: hosts left alone reach {number(baseline.accuracy[-1], 1)} %")
    return lines or ["nothing measured yet"]


def _verdict(run: Run) -> list[str]:
    completed = run.last(RunCompleted)
    if completed is None or not completed.comparisons:
        return ["not compared yet"]
    return [
        f"{clean(c.reference, 24):10s} {number(c.difference, sign=True)} pp, 95 % interval "
        f"{number(c.low, sign=True)} to {number(c.high, sign=True)}: {c.verdict.partition(' (')[0]}"
        for c in completed.comparisons
    ]


def _slots(run: Run, width: int | None) -> list[str]:
    """Lists the contents of every slot of the newest round's hosts, in columns if there is room."""
    epochs = newest(run)
    if not epochs:
        return []
    planted: dict[tuple[int, str], str] = {}
    for change in run.of(StageChanged):
        if change.episode == epochs[0].episode and change.blueprint is not None:
            planted[change.env, change.slot] = change.blueprint
    slots = list(dict.fromkeys(slot for epoch in epochs for slot in epoch.stages))
    stages = Counter(stage for epoch in epochs for stage in epoch.stages.values())
    counted = ", ".join(f"{stages[s]} {s.lower()}" for s in LIVING if stages[s]) or "no seeds"
    rows = [
        [f"host {e.env}", *(_cell(slot, e.stages.get(slot, ""), planted.get((e.env, slot))) for slot in slots)]
        for e in epochs[:MAX_HOSTS]
    ]
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None and HEADS + sum(wide) + 2 * len(wide) > width:
        wide = [0] * len(wide)
    lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, wide, strict=True)) for row in rows]
    more = len(epochs) - MAX_HOSTS
    note = [f"and {more} more hosts"] if more > 0 else []
    return [f"round {epochs[0].episode + 1}: {counted}", *lines, *note]


def _cell(slot: str, stage: str, blueprint: str | None) -> str:
    what = "-" if stage in ("DORMANT", "") else f"{blueprint or 'seed'} {stage.lower()}"
    return clean(f"{slot} {what}", 60)


def _blueprints(run: Run) -> list[str]:
    """Describes the fate of the most planted blueprints, over all rounds."""
    rows = run.blueprints.rows()
    lines = []
    for row in rows[:MAX_BLUEPRINTS]:
        worth = row.contribution_kept
        kept = "" if worth is None else f" (contribution {number(worth, sign=True)} pp)"
        lines.append(
            f"{clean(row.blueprint, 24):14s} {row.germinated:,} planted, {row.fossilized:,} kept{kept}, "
            f"{row.pruned + row.cut + row.rolled_back:,} removed, {row.living:,} unfinished"
        )
    more = len(rows) - MAX_BLUEPRINTS
    lines += [f"and {more} more blueprints"] if more > 0 else []
    if any(row.contribution_kept is not None for row in rows[:MAX_BLUEPRINTS]):
        lines.append("contribution: accuracy with the seed minus accuracy without it when it was kept, mean")
    return lines


def _warnings(run: Run) -> list[str]:
    return [
        f"round {event.round}{f', {times} times' if times > 1 else ''}: {event.found}; try: {event.advice}"
        for times, event in run.warnings()
    ]


def _policy(run: Run) -> list[str]:
    update = run.last(PolicyUpdated)
    if update is None:
        return []
    heads = ", ".join(f"{name} {number(value)}" for name, value in update.head_entropies.items())
    return [
        f"round {update.round}: entropy {number(update.entropy)}, KL {number(update.approx_kl, 3)}, clipped "
        f"{number(update.clip_fraction)}, explained variance {number(update.explained_variance)}, "
        f"{update.env_steps:,} env steps",
        f"entropy by head: {heads}",
    ]


def _time(run: Run) -> list[str]:
    last = run.last(RoundCompleted)
    if last is None:
        return []
    parts = shares(last)
    total = sum(parts.values()) or 1.0
    ranked = sorted(parts.items(), key=lambda item: -item[1])
    told = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in ranked if seconds / total >= 0.005)
    return [f"round {last.round}: {_duration(last.seconds)}: {told}"]


def _memory(run: Run) -> list[str]:
    """Bytes in use at the end of the last round, a line for each GPU and for CPU memory."""
    last = run.last(RoundCompleted)
    return [] if last is None else memory_words(last.memory)


def _last_events(run: Run) -> list[str]:
    """Returns the newest notable events. The log is grouped by kind here, so they are sorted by round and epoch."""
    found: list[tuple[tuple[int, int], str]] = []
    kinds: Sequence[type[Event]] = (ActionTaken, GovernorRollback, SeedCut)
    for kind in kinds:
        found += [((e.episode, e.epoch), _told(e)) for e in run.events.get(kind, [])[-LAST_EVENTS:]]
    found.sort(key=lambda item: item[0])
    return [words for _, words in found[-LAST_EVENTS:]]


def _told(event: Event) -> str:
    match event:
        case GovernorRollback():
            what = f"rollback, {event.reason} ({number(event.value, 4)}, limit {number(event.threshold, 4)})"
        case SeedCut():
            what = f"seed cut: {event.blueprint} in {event.slot} became non-finite"
        case ActionTaken():
            done = "" if event.accepted else f": refused: {event.reason}"
            what = " ".join(filter(None, (event.op, event.blueprint, event.slot))) + done
        case _:
            raise TypeError(f"{type(event).__name__} is not among the last events")
    return f"round {event.episode + 1}, host {event.env}, epoch {event.epoch}: {what}"
