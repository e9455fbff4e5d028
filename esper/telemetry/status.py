"""The state of a run in words: the lines shared by the console, the live view and `esper show`."""

from __future__ import annotations

from esper.telemetry import event as events
from esper.telemetry.event import Event
from esper.telemetry.memory import memory_words
from esper.telemetry.run_view import RunView, phase_seconds
from esper.telemetry.stages import STAGE_WORDS
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
        grown, other, name, split = event.committed_accuracy, event.baseline_accuracy, view.alone, "validation"
    else:
        grown, other, name, split = event.test_accuracy, event.alone_test_accuracy, "alone", "test"
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
    return f"{event.images_per_second:,.0f} images/s, {epochs}" if event.samples else epochs


def accuracy(view: RunView) -> Section:
    """The accuracy, or other score, of the current and of the last round."""
    lines, score = [], view.score
    if epochs := view.current:
        grown = sum(e.validation_accuracy for e in epochs) / len(epochs)
        baseline = sum(e.baseline_accuracy for e in epochs) / len(epochs)
        beside = f", baseline {score.value(baseline, 1)} ({score.difference(grown - baseline, 1)})"
        now = f"this round, epoch {max(e.epoch for e in epochs)}: validation {score.name} {score.value(grown, 1)}"
        lines.append(now + (beside if view.alone else ""))
    if last := view.last(events.RoundCompleted):
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
    completed, shown = view.last(events.RunCompleted), view.score.difference
    return "verdict", [
        f"{clean(c.reference, 24):10s} {shown(c.difference)}, 95 % interval "
        f"{shown(c.low, unit=False)} to {shown(c.high, unit=False)}: {c.verdict.partition(' (')[0]}"
        for c in (completed.comparisons if completed else ())
    ] or ["nothing was compared" if completed else "not compared yet"]


def slots(view: RunView, width: int | None = None) -> Section:
    """The seeds of the newest round, and the contents of each of its slots, in columns if ``width`` has room."""
    epochs = [view.hosts[env] for env in sorted(view.hosts)]
    if not epochs:
        return "slots", []
    counts = ", ".join(f"{view.stages[stage]} {word}" for stage, word in STAGE_WORDS.items() if view.stages[stage])
    names = list(dict.fromkeys(slot for epoch in epochs for slot in epoch.stages))
    rows = [
        [f"host {e.env}", *(_cell(name, e.stages.get(name, ""), view.planted.get((e.env, name))) for name in names)]
        for e in epochs[:MAX_HOSTS]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is not None and HEAD_WIDTH + sum(widths) + 2 * len(widths) > width:
        widths = [0] * len(widths)
    lines = ["  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)) for row in rows]
    more = len(epochs) - MAX_HOSTS
    return "slots", [
        f"round {view.episode + 1}: {counts or 'no seeds'}",
        *lines,
        *([f"and {more} more hosts"] if more > 0 else []),
    ]


def _cell(slot: str, stage: str, blueprint: str | None) -> str:
    contents = "-" if stage in ("DORMANT", "") else f"{blueprint or 'seed'} {STAGE_WORDS.get(stage, stage.lower())}"
    return clean(f"{slot} {contents}", 60)


def blueprints(view: RunView) -> Section:
    """The fate of the most planted blueprints, over all rounds."""
    rows, lines, meaning = view.blueprints.rows(), [], []
    for row in rows[:MAX_BLUEPRINTS]:
        kept = f"{row.fossilized:,} kept"
        if row.contribution_kept is not None:
            kept += f" (contribution {view.score.difference(row.contribution_kept)})"
            name = view.score.name
            meaning = [
                f"contribution: {name} with the seed minus {name} without it when it was kept, mean: how much hosts "
                "lean on it, which is more than what planting it won"
            ]
        removed = f"{row.pruned + row.cut + row.rolled_back:,} removed, {row.living:,} unfinished"
        lines.append(f"{clean(row.blueprint, 24):14s} {row.germinated:,} planted, {kept}, {removed}")
    more = len(rows) - MAX_BLUEPRINTS
    return "blueprints", [*lines, *([f"and {more} more blueprints"] if more > 0 else []), *meaning]


def worths(view: RunView, most: int = MAX_WORTHS) -> Section:
    """The blueprints that are worth most in each slot where one was kept, by the experience of all rounds."""
    found, score = view.last(events.WorthsEstimated), view.score
    if found is None or not found.episodes:
        return "worth", []
    lines = []
    for slot, row in list(found.worths.items())[:MAX_SLOTS]:
        best = sorted(((*worth, name) for name, worth in row.items() if worth[2]), reverse=True)[:most]
        seeds = (
            f"{clean(name, 24)} {score.difference(mean, 1)} ± {score.value(error, 1, unit=False)} (kept {kept}x)"
            for mean, error, kept, name in best
        )
        lines += [f"{clean(slot, 24)}: {', '.join(seeds)}"] if best else []
    more = len(found.worths) - MAX_SLOTS
    meaning = f"what a kept seed adds to the final {score.name}, estimate ± error over {found.episodes:,} episodes"
    return "worth", [*lines, *([f"and {more} more slots"] if more > 0 else []), meaning]


def policy(view: RunView) -> Section:
    """The last update of the agent."""
    update = view.last(events.PolicyUpdated)
    if update is None:
        return "policy", []
    heads = ", ".join(f"{name} {number(value)}" for name, value in update.head_entropies.items())
    stopped = ", stopped early" if update.stopped_early else ""
    return "policy", [
        f"round {update.round}: entropy {number(update.entropy)}, KL {number(update.approx_kl, 3)}, clipped "
        f"{number(update.clip_fraction)}, explained variance {number(update.explained_variance)}",
        f"{update.minibatches} minibatches{stopped}, gradient norm {number(update.gradient_norm)}, learning rate "
        f"{update.learning_rate:.1e}, {update.env_steps:,} env steps",
        f"entropy by head: {heads}",
        *([validated(found)] if (found := view.last(events.AgentValidated)) else []),
    ]


def warnings(view: RunView) -> Section:
    """Anomalies of learning, with advice."""
    return "warnings", [
        f"round {event.round}{f', {times} times' if times > 1 else ''}: {event.found}; try: {event.advice}"
        for times, event in view.warnings()
    ]


def time(view: RunView) -> Section:
    """The duration of the last round and the share of each phase, largest first."""
    last = view.last(events.RoundCompleted)
    if last is None:
        return "time", []
    phases = phase_seconds(last)
    total = sum(phases.values()) or 1.0
    ranked = sorted(phases.items(), key=lambda phase: -phase[1])
    shares = [f"{name} {seconds / total:.0%}" for name, seconds in ranked if seconds / total >= MIN_SHARE]
    return "time", [f"round {last.round}: {duration(last.seconds)}" + (f": {', '.join(shares)}" if shares else "")]


def memory(view: RunView) -> Section:
    """Bytes in use at the end of the last round, a line for each GPU and for CPU memory."""
    last = view.last(events.RoundCompleted)
    return "memory", memory_words(last.memory) if last else []


def last_events(view: RunView) -> Section:
    """The newest actions, rollbacks and cut seeds."""
    return "last events", [": ".join(filter(None, incident(event))) for event in view.recent]


def incident(event: Event) -> tuple[str, str, str]:
    """Describes an event of one host: place, what happened, details."""
    match event:
        case events.GovernorRollback():
            limits = f"{number(event.value, 4)}, limit {number(event.threshold, 4)}"
            what, why = "rollback", f"{event.reason} ({limits}), back to epoch {event.restored_epoch}"
        case events.SeedCut():
            what, why = "seed cut", f"{event.blueprint} in {event.slot} became non-finite"
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
