"""Text report of a comparison: one table per metric, readable at 80 columns, and a verdict in words."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from esper.evaluation.analysis import ALPHA, Findings, smallest_p
from esper.evaluation.comparison import Outcome
from esper.stats.paired import MIN_PAIRS
from esper.stats.samples import Interval


def print_report(outcome: Outcome, console: Console, full: bool = False) -> None:
    """Prints the first metric in full and the others as one table each; with ``full``, all of them in full."""
    _line(console, headline(outcome))
    for number, findings in enumerate(outcome.findings):
        metric = findings.metric
        values = {metric.of(host) for hosts in outcome.hosts.values() for host in hosts}
        _line(console, "")
        if findings.missing:
            _line(console, f"{metric.title}: {findings.missing}")
        elif len(values) == 1:
            _line(console, f"{metric.title}: {figure(values.pop(), metric.decimals)} for every host")
        elif full or number == 0:
            _line(console, metric.heading)
            for table in (_arms(findings), _differences(findings), _effects(findings)):
                _line(console, "")
                console.print(table)
            _line(console, "")
            for found in findings.versus.values():
                names = "" if found.conclusive else f"{found.pair.name_a} and {found.pair.name_b}: "
                _line(console, names + found.verdict)
        else:
            _line(console, metric.heading)
            console.print(_differences(findings, means=True))
    _line(console, "")
    for note in notes(outcome):
        _line(console, note)


def headline(outcome: Outcome) -> str:
    pairs = "1 pair" if outcome.pairs == 1 else f"{outcome.pairs} pairs"
    if outcome.pairs < outcome.asked:
        pairs = f"{outcome.pairs} of {outcome.asked} requested pairs"
    return f"Committed hosts of {outcome.task} after their last epoch: {pairs}, seed {outcome.seed}"


def notes(outcome: Outcome) -> Iterator[str]:
    """Yields what a reader must know to interpret the numbers."""
    others = len(outcome.arms) - 1
    yield (
        f"Differences are arm minus {outcome.reference}, pair by pair. The verdict is that of the paired sign-flip "
        f"test, with p corrected for {others} {'comparison' if others == 1 else 'comparisons'} per metric (Holm). "
        "IQM: interquartile mean; intervals: bootstrap, 95 %."
    )
    if outcome.pairs < outcome.asked:
        again = f"esper compare --resume {shlex.quote(str(outcome.folder))}"
        yield f"Only {outcome.pairs} of {outcome.asked} pairs are complete. To continue: {again}"
    if outcome.pairs < MIN_PAIRS:
        yield f"Fewer than {MIN_PAIRS} pairs are always inconclusive."
    elif smallest_p(outcome.pairs, others) >= ALPHA:
        yield (
            f"{outcome.pairs} pairs cannot show a difference in {others} comparisons at once: the smallest possible "
            f"corrected p is {smallest_p(outcome.pairs, others):.2g}. Use more pairs or fewer arms."
        )
    controls = [f"{arm.name} is made for each host of {arm.of}" for arm in outcome.arms if arm.of]
    if controls:
        yield f"{'; '.join(controls)}. {_how_near(outcome)}".strip()


def _how_near(outcome: Outcome) -> str:
    """Describes how closely wider hosts match their target size, and longer training its target compute."""
    told = []
    for arm in outcome.arms:
        hosts = outcome.hosts[arm.name]
        for wanted, found in (("wanted_parameters", "parameters"), ("wanted_flops", "flops")):
            off = [getattr(host, found) / host.facts[wanted] - 1 for host in hosts if wanted in host.facts]
            if off:
                what = "FLOPs" if found == "flops" else found
                told.append(f"Relative to them, {arm.name} has {min(off):+.1%} to {max(off):+.1%} {what}.")
    return " ".join(told)


def _arms(findings: Findings) -> Table:
    """Summary of each arm."""
    digits = findings.metric.decimals
    table = _table("mean", "std", "95 %", "IQM", "95 %")
    for name, summary in findings.arms.items():
        table.add_row(
            escape(name),
            figure(summary.mean, digits),
            figure(summary.std, digits),
            interval(summary.mean_interval, digits),
            figure(summary.iqm, digits),
            interval(summary.iqm_interval, digits),
        )
    return table


def _differences(findings: Findings, means: bool = False) -> Table:
    """Each arm minus the reference, and the verdict; with ``means``, also the mean of each arm."""
    digits = findings.metric.decimals
    table = _table(*(["mean"] if means else []), "difference", "95 %", "p", "verdict")
    for name, summary in findings.arms.items():
        found = findings.versus.get(name)
        mean = [figure(summary.mean, digits)] if means else []
        if found is None:
            table.add_row(escape(name), *mean, "", "", "", "reference")
            continue
        pair = found.pair
        difference = (figure(pair.difference, digits, "+"), interval(pair.interval, digits, "+"))
        table.add_row(escape(name), *mean, *difference, f"{found.adjusted_p:.2g}", found.word)
    return table


def _effects(findings: Findings) -> Table:
    """Statistics that do not affect the verdict."""
    table = _table("higher/same/lower", "d_z", "Cliff's delta", "Mann-Whitney U", "its p")
    for name, found in findings.versus.items():
        pair = found.pair
        table.add_row(
            escape(name),
            f"{pair.wins}/{pair.ties}/{pair.losses}",
            figure(pair.effect_size, 2, "+"),
            f"{pair.cliffs_delta:+.2f}",
            f"{pair.mann_whitney_u:g}",
            f"{pair.mann_whitney_p:.2g}",
        )
    return table


def _table(*headings: str) -> Table:
    """Returns a table with arms in the first column; only their names may wrap."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("arm", overflow="fold", min_width=9, max_width=20)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "verdict" else "right", no_wrap=True)
    return table


def figure(value: float, digits: int, sign: str = "") -> str:
    """Formats ``value`` with ``digits`` decimals, fewer if it has more than two integer digits; "" if not finite."""
    if not math.isfinite(value):
        return ""
    before = len(f"{abs(value):.0f}")
    return f"{value:{sign},.{max(0, digits - max(0, before - 2))}f}"


def interval(limits: Interval, digits: int, sign: str = "") -> str:
    """``83.10..85.20``; empty if the interval is unbounded, as for a single pair."""
    if not math.isfinite(limits.high):
        return ""
    return f"{figure(limits.low, digits, sign)}..{figure(limits.high, digits, sign)}"


def _line(console: Console, text: str) -> None:
    # Verbatim: a slot or a path in brackets is not markup.
    console.print(text, markup=False, highlight=False)
