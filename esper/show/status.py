"""The state of a run in words: the lines shared by the console, the live view and `esper show`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from esper.show.run_view import RunView, phase_seconds
from esper.show.stages import STAGE_WORDS
from esper.telemetry import event as events
from esper.telemetry.event import Event
from esper.telemetry.memory import memory_words
from esper.telemetry.text import clean, duration, number, shorten

HEAD_WIDTH = 13
MAX_LINE = 500
MAX_BLUEPRINTS = 8
MAX_HOSTS = 16
MAX_SLOTS = 8
MAX_WORTHS = 3
"""Blueprints listed of each slot, the best ones."""
MIN_SHARE = 0.005
"""Phases with a smaller share of the time are not listed."""

Section = tuple[str, list[str]]
"""A heading and its lines."""


def accuracies(event: events.RoundCompleted, view: RunView) -> str:
    """Formats the accuracy or other score of grown hosts beside hosts left alone.

    They are test accuracies if measured, otherwise (in rounds that an agent learns from) validation accuracies, beside
    the baseline's curve, if there is one.
    """
    score = view.score
    if event.test_accuracy is None or event.alone_test_accuracy is None:
        split = "validation"
        grown = event.committed_accuracy
        name = view.alone
        other = event.baseline_accuracy
    else:
        split = "test"
        grown = event.test_accuracy
        name = "alone"
        other = event.alone_test_accuracy
    ours = f"{split} {score.name}: grown {score.value(grown, 1)}"
    if name is None:
        return ours
    return f"{ours}  {name} {score.value(other, 1)}  ({score.difference(grown - other, 1)})"


def practice(event: events.PracticeRound) -> str:
    return f"practice on simulated hosts, round {event.round}/{event.rounds}: return {event.mean_return:+.3f}"


def validated(event: events.AgentValidated) -> str:
    best = "the best so far" if event.best_round == event.round else f"that of round {event.best_round} is kept"
    return f"agent of round {event.round}: return {event.mean_return:+.3f} on validation hosts, {best}"


def rates(event: events.RoundCompleted) -> str:
    """Formats the throughput of a round; simulated hosts have no images."""
    epochs = f"{event.epochs_per_second:,.1f} epochs/s"
    if not event.samples:
        return epochs
    return f"{event.images_per_second:,.0f} images/s, {epochs}"


def accuracy(view: RunView) -> Section:
    """The accuracy, or other score, of the current and of the last round."""
    lines = []
    score = view.score
    epochs = view.current
    if epochs:
        grown = sum(epoch.validation_accuracy for epoch in epochs) / len(epochs)
        newest = max(epoch.epoch for epoch in epochs)
        now = f"this round, epoch {newest}: validation {score.name} {score.value(grown, 1)}"
        if view.alone:
            baseline = sum(epoch.baseline_accuracy for epoch in epochs) / len(epochs)
            now += f", baseline {score.value(baseline, 1)} ({score.difference(grown - baseline, 1)})"
        lines.append(now)
    last = view.last(events.RoundCompleted)
    if last is not None:
        lines.append(
            f"round {last.round}: {accuracies(last, view)}, return {number(last.mean_return, 3, sign=True)}, "
            f"{number(last.fossils, 1)} fossils per host"
        )
    alone = view.last(events.BaselineMeasured)
    if not lines and alone and alone.accuracy:
        lines.append(f"baseline: hosts left alone reach {score.value(alone.accuracy[-1], 1)}")
    return shorten(score.name, HEAD_WIDTH - 1), lines or ["nothing measured yet"]


def verdict(view: RunView) -> Section:
    """The comparison of the run's controller with others."""
    completed = view.last(events.RunCompleted)
    if completed is None:
        return "verdict", ["not compared yet"]
    difference = view.score.difference
    lines = []
    for comparison in completed.comparisons:
        low = difference(comparison.low, unit=False)
        high = difference(comparison.high, unit=False)
        words, _, _ = comparison.verdict.partition(" (")  # figures follow, which are shown already
        lines.append(
            f"{clean(comparison.reference, 24):10s} {difference(comparison.difference)}, 95 % interval "
            f"{low} to {high}: {words}"
        )
    return "verdict", lines or ["nothing was compared"]


def slots(view: RunView, width: int | None = None) -> Section:
    """The seeds of the newest round, and the contents of each of its slots, in columns if ``width`` has room."""
    epochs = [view.hosts[env] for env in sorted(view.hosts)]
    if not epochs:
        return "slots", []
    stages = view.stages
    counts = ", ".join(f"{stages[stage]} {word}" for stage, word in STAGE_WORDS.items() if stages[stage])
    names: dict[str, None] = {}  # in the order in which they first occur
    for epoch in epochs:
        names |= dict.fromkeys(epoch.stages)
    rows = [_row(epoch, names, view) for epoch in epochs[:MAX_HOSTS]]
    # Two spaces stand between cells; without a width, there is room.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None and HEAD_WIDTH + sum(widths) + 2 * len(widths) > width:
        widths = [0] * len(widths)  # no columns
    lines = [f"round {view.episode + 1}: {counts or 'no seeds'}"]
    for row in rows:
        cells = [cell.ljust(size) for cell, size in zip(row, widths, strict=True)]
        lines.append("  ".join(cells))
    return "slots", lines + _rest(len(epochs), MAX_HOSTS, "hosts")


def _row(epoch: events.EpochCompleted, names: Iterable[str], view: RunView) -> list[str]:
    """Returns the name of a host and the contents of its slots ``names``."""
    cells = [f"host {epoch.env}"]
    for slot in names:
        contents = "-"
        stage = epoch.stages.get(slot, "DORMANT")
        if stage not in ("DORMANT", ""):
            seed = view.planted.get((epoch.env, slot)) or "seed"
            contents = f"{seed} {STAGE_WORDS.get(stage, stage.lower())}"
        cells.append(clean(f"{slot} {contents}", 60))
    return cells


def _rest(count: int, most: int, things: str) -> list[str]:
    """Returns the line that says how many of ``count`` things are not listed; [] if all are."""
    if count <= most:
        return []
    return [f"and {count - most} more {things}"]


def blueprints(view: RunView) -> Section:
    """The fate of the most planted blueprints, over all rounds."""
    rows = view.blueprints.rows()
    name = view.score.name
    lines = []
    meaning = []
    for row in rows[:MAX_BLUEPRINTS]:
        kept = f"{row.fossilized:,} kept"
        if row.contribution_kept is not None:
            kept += f" (contribution {view.score.difference(row.contribution_kept)})"
            # Explained once, if any contribution is shown.
            meaning = [
                f"contribution: {name} with the seed minus {name} without it when it was kept, mean: how much hosts "
                "lean on it, which is more than what planting it won"
            ]
        removed = f"{row.pruned + row.cut + row.rolled_back:,} removed, {row.living:,} unfinished"
        lines.append(f"{clean(row.blueprint, 24):14s} {row.germinated:,} planted, {kept}, {removed}")
    lines += _rest(len(rows), MAX_BLUEPRINTS, "blueprints")
    return "blueprints", lines + meaning


def worths(view: RunView, most: int = MAX_WORTHS) -> Section:
    """The blueprints that are worth most in each slot where one was kept, by the experience of all rounds."""
    estimated = view.last(events.WorthsEstimated)
    if estimated is None or not estimated.episodes:
        return "worth", []
    score = view.score
    lines = []
    for slot, row in islice(estimated.worths.items(), MAX_SLOTS):
        # By the estimated worth, of those that were kept at least once.
        kept = [(*worth, name) for name, worth in row.items() if worth[2]]
        kept.sort(reverse=True)
        seeds = []
        for mean, error, times, name in kept[:most]:
            worth = f"{score.difference(mean, 1)} ± {score.value(error, 1, unit=False)}"
            seeds.append(f"{clean(name, 24)} {worth} (kept {times}x)")
        if seeds:
            lines.append(f"{clean(slot, 24)}: {', '.join(seeds)}")
    lines += _rest(len(estimated.worths), MAX_SLOTS, "slots")
    lines.append(
        f"what a kept seed adds to the final {score.name}, estimate ± error over {estimated.episodes:,} episodes"
    )
    return "worth", lines


def policy(view: RunView) -> Section:
    """The last update of the agent."""
    update = view.last(events.PolicyUpdated)
    if update is None:
        return "policy", []
    heads = ", ".join(f"{name} {number(value)}" for name, value in update.head_entropies.items())
    stopped = ", stopped early" if update.stopped_early else ""
    lines = [
        f"round {update.round}: entropy {number(update.entropy)}, KL {number(update.approx_kl, 3)}, clipped "
        f"{number(update.clip_fraction)}, explained variance {number(update.explained_variance)}",
        f"{update.minibatches} minibatches{stopped}, gradient norm {number(update.gradient_norm)}, learning rate "
        f"{update.learning_rate:.1e}, {update.env_steps:,} env steps",
        f"entropy by head: {heads}",
    ]
    validation = view.last(events.AgentValidated)
    if validation is not None:
        lines.append(validated(validation))
    return "policy", lines


def warnings(view: RunView) -> Section:
    """Anomalies of learning, with advice."""
    lines = []
    for times, event in view.warnings():
        when = f"round {event.round}"
        if times > 1:
            when += f", {times} times"
        lines.append(f"{when}: {event.found}; try: {event.advice}")
    return "warnings", lines


def time(view: RunView) -> Section:
    """The duration of the last round and the share of each phase, largest first."""
    last = view.last(events.RoundCompleted)
    if last is None:
        return "time", []
    phases = phase_seconds(last)
    total = sum(phases.values()) or 1.0
    shares = []
    for name, seconds in sorted(phases.items(), key=lambda phase: -phase[1]):
        share = seconds / total
        if share >= MIN_SHARE:
            shares.append(f"{name} {share:.0%}")
    line = f"round {last.round}: {duration(last.seconds)}"
    if shares:
        line += f": {', '.join(shares)}"
    return "time", [line]


def memory(view: RunView) -> Section:
    """Bytes in use at the end of the last round, a line for each GPU and for CPU memory."""
    last = view.last(events.RoundCompleted)
    if last is None:
        return "memory", []
    return "memory", memory_words(last.memory)


def last_events(view: RunView) -> Section:
    """The newest actions, rollbacks and cut seeds."""
    return "last events", [": ".join(filter(None, incident(event))) for event in view.recent]


def incident(event: Event) -> tuple[str, str, str]:
    """Describes an event of one host: place, what happened, details."""
    match event:
        case events.GovernorRollback():
            what = "rollback"
            limits = f"{number(event.value, 4)}, limit {number(event.threshold, 4)}"
            why = f"{event.reason} ({limits}), back to epoch {event.restored_epoch}"
        case events.SeedCut():
            what = "seed cut"
            why = f"{event.blueprint} in {event.slot} became non-finite"
        case events.ActionTaken():
            what = " ".join(filter(None, (event.op, event.blueprint, event.slot)))
            why = "" if event.accepted else f"refused: {event.reason}"
        case events.MicroBatchHalved():
            split = f"from this epoch on, each batch is split into {event.micro_batches} micro-batches"
            why = f"batch {event.batch} ({event.reason}); {split}"
            return f"host {event.env}, epoch {event.epoch}", "out of memory", why
        case _:
            raise TypeError(f"{type(event).__name__} is not an event of one host")
    return f"round {event.episode + 1}, host {event.env}, epoch {event.epoch}", what, why
