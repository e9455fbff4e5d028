"""The sections of a run, each a list of charts, tables and notes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import chain

from esper.show.charts import Block, Chart, Interval, Intervals, Line, SlotLanes, Table, note
from esper.show.console import incident, rates
from esper.show.learning import OTHER_HOSTS, agent
from esper.show.view import REST, RunView, phase_seconds
from esper.telemetry import event as events
from esper.telemetry.memory import memory_words
from esper.telemetry.span import PHASES
from esper.telemetry.text import count, duration, number, p_value, trained_once

MAX_HOSTS = 100
"""Max hosts in the table of hosts, the newest ones."""
COUNTS = {
    "planted": "germinated",
    "kept": "fossilized",
    "pruned": "pruned",
    "cut": "cut",
    "rolled back": "rolled_back",
    "unfinished": "living",
    "refused": "rejected",
}
"""Heading of a column, and its count; see :class:`~esper.telemetry.analytics.BlueprintRow`."""
GRADIENTS = ("need", "norm", "ratio", "health", "vanishing", "exploding")
"""Columns of the table of need and gradients."""
MIN_SHARE = 0.005
"""Phases with a smaller share of the time are not listed."""


def verdict(view: RunView) -> list[Block]:
    """The comparison of the run's controller with others."""
    completed = view.last(events.RunCompleted)
    if completed is None:
        return []
    if not completed.comparisons:
        return [note("Nothing was compared.")]
    score = view.score
    rows = []
    intervals = []
    for c in completed.comparisons:
        value, low, high = map(score.of, (c.difference, c.low, c.high))
        intervals.append(Interval(c.reference, value, low, high))
        ends = "none"
        if math.isfinite(c.high):
            ends = f"{score.difference(c.low, unit=False)} to {score.difference(c.high, unit=False)}"
        row = [
            c.reference,
            score.value(c.accuracy, unit=False),
            score.value(c.reference_accuracy, unit=False),
            score.difference(c.difference, unit=False),
            ends,
            p_value(c.p_value),
            c.verdict.partition(" (")[0],  # the numbers in brackets are shown already
        ]
        rows.append(row)
    heads = [
        "against",
        score.label("grown"),
        score.label("other"),
        score.gap_label("difference"),
        "95 % interval",
        "p (Holm)",
        "verdict",
    ]
    words = f"Test {score.name} of committed networks minus that of the same hosts under each other controller."
    sentences = [f"{count(completed.pairs, 'pair')}."]
    sentences += trained_once([completed.controller])
    about = " ".join(sentences)
    label = score.gap_label(f"difference of test {score.name}")
    return [
        Intervals("Difference to each baseline", words, intervals, label, score.gap),
        Table("Comparison", heads, rows, about),
    ]


def accuracy(view: RunView) -> list[Block]:
    """The score with and without growth: by epoch of the newest round, by round, by class, and of each host."""
    return [*_by_epoch(view), *_by_round(view), *_by_class(view), *_hosts(view)]


def _by_epoch(view: RunView) -> list[Block]:
    """Validation score of the newest round by epoch, and that of the baseline."""
    score = view.score.while_training
    lines = []
    baseline = view.last(events.BaselineMeasured)
    if view.hosts:
        x = sorted(view.epochs)
        lowest = []
        highest = []
        for same in view.by_epoch():
            scores = [score.of(e.validation_accuracy) for e in same]
            lowest.append(min(scores))
            highest.append(max(scores))
        grown = list(map(score.of, view.curve("validation_accuracy")))
        committed = list(map(score.of, view.curve("committed_accuracy")))
        lines.append(Line("grown", x, grown, 0, lowest, highest))
        lines.append(Line("committed", x, committed, 2, shared=False))
        if view.has_baseline:
            alone = list(map(score.of, view.curve("baseline_accuracy")))
            lines.append(Line("without growth", x, alone, -1, reference=True))
    elif baseline:
        curve = list(map(score.of, baseline.accuracy))
        lines.append(Line("without growth", range(len(curve)), curve, -1, reference=True))
    if not lines:
        return []
    words = (
        "Mean over the hosts of the newest round; shaded: all hosts. Hosts whose episode has ended count with their "
        "last epoch. Committed: host and fossils only."
    )
    label = score.label(f"validation {score.name}")
    return [Chart(f"{score.name} by epoch", words, lines, "epochs done", label)]


def _by_round(view: RunView) -> list[Block]:
    last = view.last(events.RoundCompleted)
    if last is None:
        return []
    newest = view.compared(last)
    score = newest.score
    split = newest.split
    x = []
    grown = []
    alone = []
    for event in view.of(events.RoundCompleted):
        found = view.compared(event)
        if found.split != split:
            continue
        x.append(event.round)
        grown.append(score.of(found.grown))
        if found.other is not None:
            alone.append(score.of(found.other))
    comparable = not view.hosts_differ
    lines = [Line("grown", x, grown, connected=comparable)]
    if alone:
        lines.append(Line("without growth", x, alone, -1, reference=True, connected=comparable))
    words = f"{capital(score.name)} of the committed networks at the end of a round."
    if not comparable:
        words += OTHER_HOSTS
    label = score.label(f"{split} {score.name}")
    return [Chart(f"{score.name} by round", words, lines, "round", label)]


def _by_class(view: RunView) -> list[Block]:
    """Accuracy on each class, of hosts left alone and of the newest complete round's."""
    completed = view.of(events.EpisodeCompleted)
    baseline = view.last(events.BaselineMeasured)
    if baseline is None or not baseline.class_accuracy:
        return []
    newest = [e.class_accuracy for e in completed if e.episode == completed[-1].episode]
    found = [of_host for of_host in newest if len(of_host) == len(baseline.class_accuracy)]
    score = view.score.while_training
    rows = []
    for label, (alone, *hosts) in enumerate(zip(baseline.class_accuracy, *found, strict=True)):
        grown = _mean(hosts)
        if not math.isnan(grown):
            values = [score.value(alone, unit=False), score.value(grown, unit=False)]
            rows.append([str(label), *values, score.difference(grown - alone, unit=False)])
    heads = ["class", score.label("alone"), score.label("grown"), score.gap_label("difference")]
    words = f"Validation {score.name} at the end, means: of the baseline, and of the newest round's committed hosts."
    return _table(f"{capital(score.name)} by class", heads, rows, words)


def _hosts(view: RunView) -> list[Block]:
    """Size and score of each host that completed its episode and kept a seed, by round, the newest first."""
    score = view.score.while_training
    kept = [e for e in view.of(events.EpisodeCompleted) if e.fossils]
    kept.sort(key=lambda e: (-e.episode, e.env))
    rows = []
    for e in kept[:MAX_HOSTS]:
        alone = None
        if view.has_baseline:
            alone = e.baseline_accuracy
        row = [
            f"round {e.episode + 1}, host {e.env}",
            f"{e.host_parameters + e.fossil_parameters:,}",
            f"{e.host_flops + e.fossil_flops:,.0f}",
            score.value(e.committed_accuracy, unit=False),
            score.value(alone, unit=False),
            ", ".join(map(" ".join, e.fossils.items())),
        ]
        rows.append(row)
    heads = ["host", "parameters", "FLOPs", score.label("committed"), score.label("baseline"), "kept"]
    words = (
        "Validation split; the newest round first. Hosts that kept nothing are left out. FLOPs are of a forward pass, "
        "a sample."
    )
    if len(kept) > MAX_HOSTS:
        words += f" {MAX_HOSTS} of {len(kept):,} hosts are shown."
    return _table("Hosts that kept a seed", heads, rows, words)


def slots(view: RunView) -> list[Block]:
    if not view.hosts:
        return []
    return [SlotLanes(view, f"Slots in round {view.episode + 1}")]


def warnings(view: RunView) -> list[Block]:
    """Anomalies of learning, with advice."""
    notes: list[Block] = []
    for times, event in view.warnings():
        when = f"round {event.round}"
        if times > 1:
            when += f", {times} times"
        notes.append(note(f"{when}: {event.found}; try: {event.advice}"))
    return notes


def blueprints(view: RunView) -> list[Block]:
    """Fate of the seeds of each blueprint, and their contribution where they were kept."""
    score = view.score.while_training
    rows = []
    for row in [*view.blueprints.rows(), view.blueprints.total()]:
        if row.fossilized:
            cells = [f"{getattr(row, name):,}" for name in COUNTS.values()]
            contribution = "kept at once"
            if row.contribution_kept is not None:
                contribution = score.difference(row.contribution_kept, unit=False)
            rows.append([row.blueprint, *cells, contribution, number(row.parameters, 0)])
    heads = ["blueprint", *COUNTS, score.gap_label("contribution when kept"), "parameters"]
    words = (
        f"Contribution: {score.name} with the seed minus {score.name} without it when it was kept, mean: how much "
        "hosts lean on the seed, which exceeds the gain from planting it. Seeds that are kept at once have none by "
        "then. Seeds never kept are only in the sum."
    )
    return _table("Seeds by blueprint, all rounds", heads, rows, words)


def contributions(view: RunView) -> list[Block]:
    """The contribution of each kept seed of the newest complete round, and its share in the gain of all."""
    score = view.score.while_training
    completed = view.of(events.EpisodeCompleted)
    rows = []
    for e in completed:
        if e.episode < completed[-1].episode:
            continue
        life = view.lives.get((e.episode, e.env))
        seeds = life.present if life else {}
        for slot, (share, error) in e.shapley.items():
            seed = seeds.get(slot)
            blueprint = ""
            contribution = None
            if seed is not None:
                blueprint = seed.blueprint
                contribution = seed.contribution
            row = [
                f"host {e.env}",
                slot,
                blueprint,
                score.difference(contribution, unit=False),
                f"{score.difference(share, unit=False)} ± {score.value(error, unit=False)}",
            ]
            rows.append(row)
    heads = ["host", "slot", "seed", score.gap_label("contribution"), score.gap_label("Shapley value")]
    words = (
        "At the end of the newest complete round. Shapley values divide the joint gain of a host's seeds among them."
    )
    return _table("Contributions of seeds", heads, rows, words)


def gradients(view: RunView) -> list[Block]:
    """Need of the slots and gradients of the host and its seeds, means over the hosts of the newest round."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _, epochs in sorted(view.epochs.items()):
        for epoch in epochs:
            for owner, statistics in epoch.gradients.items():
                for name, value in statistics.items():
                    found[owner][name].append(value)
            for slot, need in epoch.needs.items():
                found[slot]["need"].append(need)
    rows = []
    for owner in sorted(found):
        means = [_mean(found[owner][name]) for name in GRADIENTS]
        rows.append([owner, *("" if math.isnan(mean) else number(mean) for mean in means)])
    words = (
        "Means over the epochs of all hosts of the newest round. Need: loss that the layer at a vacant slot cannot "
        "lower by its own weights. Norm: of gradients before clipping. Ratio: of a seed's to the host's, by element."
    )
    return _table("Need and gradients", ["", *GRADIENTS], rows, words)


def _mean(values: Sequence[float]) -> float:
    """Returns the mean of the values that are not NaN; NaN without any."""
    known = [value for value in values if not math.isnan(value)]
    # Divided one by one: the sum of a few huge ones has no number.
    return sum(value / len(known) for value in known) if known else math.nan


def rewards(view: RunView) -> list[Block]:
    """Each reward term by epoch of the newest round."""
    names = dict.fromkeys(chain.from_iterable(epoch.reward_terms for epoch in view.hosts.values()))
    x = sorted(view.epochs)
    lines = []
    for place, name in enumerate(names):
        means = []
        for epoch in x:
            hosts = view.epochs[epoch]
            means.append(sum(e.reward_terms.get(name, 0.0) for e in hosts) / len(hosts))
        lines.append(Line(name, x, means, place, shared=False))
    if not lines:
        return []
    words = "Mean over the hosts of the newest round whose episode had not ended before."
    return [Chart("Reward terms", words, lines, "epochs done", "reward of an epoch", 3)]


def time(view: RunView) -> list[Block]:
    """The seconds of each phase over all rounds, largest first, the throughput, and the waiting of ranks."""
    rounds = view.of(events.RoundCompleted)
    if not rounds:
        return []
    seconds: Counter[str] = Counter()
    for event in rounds:
        seconds.update(phase_seconds(event))
    whole = seconds.total() or 1.0
    meanings = {**PHASES, REST: "hosts left alone, testing, reports; the training of a loop outside Esper"}
    rows = []
    for name, spent in seconds.most_common():
        share = spent / whole
        if share >= MIN_SHARE:
            row = [name, f"{spent:,.1f}", f"{share:.0%}", meanings.get(name, "")]
            rows.append(row)
    last = rounds[-1]
    joint = 0.0
    waited: dict[int, float] = defaultdict(float)
    for lap in view.of(events.RanksWaited):
        joint += lap.seconds
        for rank, share in enumerate(lap.waited):
            waited[rank] += share
    ranks = []
    for rank, share in waited.items():
        row = [str(rank), f"{share:,.1f}", f"{share / (joint or 1.0):.1%}"]
        ranks.append(row)
    return [
        *_table("Seconds by phase, all rounds", ["phase", "seconds", "share", "what it is"], rows),
        note(f"round {last.round}: {duration(last.seconds)}, {rates(last)}"),
        *_table("Waiting for other ranks, all rounds", ["rank", "seconds", "share"], ranks),
    ]


def memory(view: RunView) -> list[Block]:
    """Bytes in use at the end of the last round, a line for each GPU and for CPU memory."""
    last = view.last(events.RoundCompleted)
    if last is None:
        return []
    return list(map(note, memory_words(last.memory)))


def happened(view: RunView) -> list[Block]:
    """Actions, gates and incidents of all rounds, and the newest events."""
    actions: Counter[tuple[str, bool]] = Counter()
    for action in view.of(events.ActionTaken):
        actions[action.op, action.accepted] += 1
    gates: Counter[tuple[str, bool]] = Counter()
    for gate in view.of(events.GateEvaluated):
        gates[gate.gate, gate.passed] += 1
    tally = []
    for counts in (actions, gates):
        for name in sorted({name for name, _ in counts}):
            row = [name, f"{counts[name, True]:,}", f"{counts[name, False]:,}"]
            tally.append(row)
    incidents: list[tuple[str, str, str]] = []
    for kind in (events.GovernorRollback, events.SeedCut):
        incidents += map(incident, view.of(kind))
    for resumed in view.of(events.RunResumed):
        place = f"after round {resumed.round}"
        if resumed.epochs:
            place += f", {resumed.epochs} epochs into the next round"
        reason = "; ".join(resumed.warnings) or "the run had stopped there, or before the next checkpoint"
        incidents.append((place, "resumed", reason))
    where = ["where", "what", "why"]
    return [
        *_table("Latest events", where, list(map(incident, view.recent))),
        *_table("Actions and gates", ["action or gate", "passed", "refused"], tally),
        *_table("Rollbacks, cut seeds, stops", where, incidents),
    ]


def _table(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    words: str = "",
) -> list[Block]:
    """Returns a table; [] without rows."""
    if not rows:
        return []
    return [Table(title, heads, rows, words)]


def capital(name: str) -> str:
    """Returns the name of a score as the start of a title; names with capitals of their own stay as they are."""
    return name.capitalize() if name.islower() else name


SECTIONS: dict[str, Callable[[RunView], list[Block]]] = {
    "verdict": verdict,
    "accuracy": accuracy,
    "slots": slots,
    "warnings": warnings,
    "agent": agent,
    "time": time,
    "blueprints": blueprints,
    "contributions": contributions,
    "gradients": gradients,
    "reward": rewards,
    "memory": memory,
    "events": happened,
}
"""The blocks of each section by its name, most important first."""


def sections(view: RunView) -> dict[str, list[Block]]:
    """Returns the blocks of each section; sections without blocks are left out."""
    found = {}
    for name, section in SECTIONS.items():
        blocks = section(view)
        if blocks:
            found[name] = blocks
    return found
