"""Slot lifecycles as swim lanes: one lane per slot, with the seeds that lived in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from esper.report.read import Run
from esper.report.svg import Ids, Scale, drawable, hint, picture, tag, text, tick_label, whole_ticks
from esper.telemetry.event import EpochCompleted, GovernorRollback, RunStarted, StageChanged

WIDTH, LANE, GAP, LEFT, RIGHT, TOP = 420, 22, 6, 64, 10, 8
STAGES = {
    "GERMINATED": "germinated: planted, not trained yet",
    "TRAINING": "training: incubated beside the host",
    "BLENDING": "blending: its alpha is changing",
    "HOLDING": "holding: fully blended, not kept yet",
    "FOSSILIZED": "fossil: kept for good",
    "PRUNED": "pruned: removed",
    "EMBARGOED": "embargoed: the slot rests",
    "RESETTING": "resetting: the slot is almost free again",
}
MAX_SLOTS = 24


@dataclass(frozen=True)
class Stretch:
    """A seed in one stage, from one epoch to another."""

    slot: str
    stage: str
    blueprint: str | None
    begin: int
    end: int
    cause: str


@dataclass(frozen=True)
class Life:
    """Everything that happened in the slots of one host."""

    episode: int
    env: int
    end: int
    """Number of epochs done so far."""
    stretches: list[Stretch]
    rollbacks: list[int]


def lives(run: Run) -> dict[tuple[int, int], Life]:
    """Returns the slot lifecycles of every host, by (episode, env)."""
    ends: dict[tuple[int, int], int] = defaultdict(int)
    for epoch in run.of(EpochCompleted):
        key = epoch.episode, epoch.env
        ends[key] = max(ends[key], epoch.epoch)
    changes: dict[tuple[int, int], list[StageChanged]] = defaultdict(list)
    for change in run.of(StageChanged):
        key = change.episode, change.env
        changes[key].append(change)
        ends[key] = max(ends[key], change.epoch)
    rollbacks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rollback in run.of(GovernorRollback):
        rollbacks[rollback.episode, rollback.env].append(rollback.epoch)
    return {
        key: Life(*key, end, _stretches(changes.get(key, []), end), rollbacks.get(key, []))
        for key, end in sorted(ends.items())
    }


def _stretches(changes: Sequence[StageChanged], end: int) -> list[Stretch]:
    """Returns the stretches between changes of a slot; those shorter than an epoch are kept with length 0."""
    by_slot: dict[str, list[StageChanged]] = defaultdict(list)
    for change in changes:
        by_slot[change.slot].append(change)
    found = []
    for slot, mine in by_slot.items():
        followers = [change.epoch for change in mine[1:]] + [end]
        for change, until in zip(mine, followers, strict=True):
            if change.after != "DORMANT":
                found.append(Stretch(slot, change.after, change.blueprint, change.epoch, until, change.cause))
    return found


def slots_of(run: Run) -> list[str]:
    """Returns the slots in the host's order, or sorted by name if the start of the run is not logged."""
    started = run.last(RunStarted)
    named = list(started.slots) if started else []
    return named + sorted({change.slot for change in run.of(StageChanged)} - set(named))


def lane_chart(ids: Ids, life: Life, slots: Sequence[str], length: int, title: str) -> str:
    """Draws one host: one lane per slot, epochs from left to right."""
    shown = list(slots)[:MAX_SLOTS]
    bottom = TOP + len(shown) * (LANE + GAP)
    scale = Scale(0, max(length, life.end, 1), LEFT, WIDTH - RIGHT)
    body = []
    for place, slot in enumerate(shown):
        at = TOP + place * (LANE + GAP)
        name = slot if len(slot) <= 8 else slot[:7] + "…"
        body.append(text(LEFT - 8, at + LANE / 2 + 4, name, anchor="end"))
        body.append(tag("rect", x=LEFT, y=at, width=WIDTH - RIGHT - LEFT, height=LANE, class_="empty"))
        body += [_stretch(s, scale, at) for s in life.stretches if s.slot == slot]
        body += _names([s for s in life.stretches if s.slot == slot], scale, at)
    for value in whole_ticks(scale):
        body.append(text(scale(value), bottom + 14, tick_label(value, 1), anchor="middle"))
    for epoch in life.rollbacks:
        if drawable(epoch):
            here = {"x1": scale(epoch), "x2": scale(epoch), "y1": TOP - 4, "y2": bottom}
            body.append(tag("line", hint(f"rollback at epoch {epoch}"), class_="rollback", **here))
    body.append(text((LEFT + WIDTH - RIGHT) / 2, bottom + 30, "epochs done", "label", "middle"))
    return picture(ids.new(), title, _in_words(life), bottom + 36, body, WIDTH)


def _stretch(s: Stretch, scale: Scale, at: float) -> str:
    words = f"{s.slot}: {s.blueprint or 'seed'} {s.stage.lower()}, epoch {s.begin} to {s.end} ({s.cause})"
    wide = max(scale(s.end) - scale(s.begin), 1.5)
    known = s.stage.lower() if s.stage in STAGES else "other"
    style = f"stage s-{known}"
    return tag("rect", hint(words), x=scale(s.begin), y=at, width=wide, height=LANE, class_=style)


def _names(stretches: Sequence[Stretch], scale: Scale, at: float) -> list[str]:
    """Draws the blueprint of each seed over its whole life, if there is room."""
    found, place = [], 0
    while place < len(stretches):
        last = place
        while last + 1 < len(stretches) and stretches[last + 1].stage not in ("GERMINATED", "PRUNED"):
            last += 1
        first, name = stretches[place], stretches[place].blueprint or ""
        room = int((scale(stretches[last].end) - scale(first.begin) - 6) / 8)
        if first.stage == "GERMINATED" and room >= min(4, len(name)) and name:
            shown = name if len(name) <= room else name[: room - 1] + "…"
            found.append(text(scale(first.begin) + 4, at + LANE / 2 + 4, shown, "seed"))
        place = last + 1
    return found


def _in_words(life: Life) -> str:
    """Describes the lifecycles in words, for readers who cannot see the chart."""
    told = [
        f"{s.slot}: {s.blueprint or 'seed'} {s.stage.lower()} from epoch {s.begin} to {s.end}" for s in life.stretches
    ]
    told += [f"rollback at epoch {epoch}" for epoch in life.rollbacks]
    return "; ".join(told) or "no seed was planted"
