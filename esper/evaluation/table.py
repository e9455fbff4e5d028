"""Text report of a comparison: one table per metric, readable at 80 columns, and a verdict in words."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from esper.evaluation.analysis import MetricResult
from esper.evaluation.comparison import ComparisonResult
from esper.evaluation.folder import RESULTS, resume_command
from esper.evaluation.plots import save_plots
from esper.evaluation.publish import save_tables
from esper.evaluation.statistics import ALPHA, MIN_PAIRS, ConfidenceInterval
from esper.files.atomic import write_atomic
from esper.telemetry.text import count

TABLE = "table.txt"
DIRECTION = {"higher": "higher is better", "lower": "lower is better", "neither": "neither direction is better"}


def write_report(result: ComparisonResult, console: Console) -> None:
    """Prints the report, then writes the full version and the plots next to the results and prints their names.

    Without matplotlib, no plots are drawn and the output says so.
    """
    print_report(result, console)
    text = io.StringIO()
    print_report(result, Console(file=text, width=100), full=True)
    write_atomic(result.folder / TABLE, text.getvalue().encode())
    files, missing = [RESULTS, TABLE, *(file.name for file in save_tables(result, result.folder))], ""
    try:
        files += [file.name for file in save_plots(result, result.folder)]
    except ImportError as error:
        missing = f" No plots: matplotlib cannot be imported ({error}); pip install matplotlib."
    _line(console, f"Written to {result.folder}: {', '.join(files)}.{missing}", soft_wrap=True)


def print_report(result: ComparisonResult, console: Console, full: bool = False) -> None:
    """Prints the first metric in full and the others as one table each; with ``full``, all of them in full."""
    pairs = counted(result)
    if result.pairs < result.requested_pairs:
        seeds, asked = result.train_seeds, result.requested_seeds
        of = f"{result.pairs} of {result.requested_pairs} requested pairs"
        pairs = of if seeds is None else f"{pairs} ({asked} training seeds were requested)"
    _line(console, f"Committed hosts of {result.task} after their last epoch: {pairs}, seed {result.seed}")
    for number, found in enumerate(result.metrics):
        metric = found.metric
        _line(console, "")
        if found.missing:
            _line(console, f"{metric.title}: {found.missing}")
            continue
        if (common := metric.common(result.hosts)) is not None:
            _line(console, f"{metric.title}: {figure(common, metric.decimals)} for every host")
            continue
        _line(console, f"{metric.label} ({DIRECTION[metric.better]})")
        if not full and number > 0:
            _print(console, _differences(found, means=True))
            continue
        for table in (_summaries(found), _differences(found), _effects(found)):
            _line(console, "")
            _print(console, table)
        _line(console, "")
        for compared in found.comparisons.values():
            _line(console, f"{compared.pair.name_a} against {compared.pair.name_b}: {compared.verdict}")
    _line(console, "")
    for note in _notes(result):
        _line(console, note)


def counted(result: ComparisonResult) -> str:
    """Returns what the comparison consists of: ``10 pairs``, or ``5 training seeds of 16 held-out hosts each``."""
    if result.train_seeds is None:
        return "1 pair" if result.pairs == 1 else f"{result.pairs} pairs"
    return f"{count(result.train_seeds, 'training seed')} of {count(result.pairs // result.train_seeds, 'host')} each"


def _notes(result: ComparisonResult) -> Iterator[str]:
    """Yields what a reader must know to interpret the numbers."""
    others, learn = len(result.arms) - 1, [arm.name for arm in result.arms if arm.learns]
    if result.train_seeds is None:
        complete = f"{result.pairs} of {result.requested_pairs} pairs"
        yield (
            f"Differences are arm minus {result.reference}, pair by pair. The verdict is that of the paired sign-flip "
            f"test, with p corrected for {count(others, 'comparison')} per metric (Holm). "
            "IQM: interquartile mean; intervals: bootstrap, 95 %."
        )
    else:
        complete = f"{result.train_seeds} of {result.requested_seeds} training seeds"
        yield (
            f"{', '.join(learn)}: trained with each training seed, on the same hosts, then playing greedily on "
            f"held-out hosts of that seed. Differences are arm minus {result.reference}. The unit of evidence is the "
            "training seed: std, IQM and the paired t test are over the means of seeds, and intervals are bootstrap, "
            "95 %, of seeds and of hosts within them. "
            f"p is corrected for {count(others, 'comparison')} per metric (Holm)."
        )
    if result.pairs < result.requested_pairs:
        yield f"Only {complete} are complete. To continue: {resume_command(result.folder, result.arms)}"
    if result.train_seeds is None:
        smallest = smallest_p(result.pairs, others)
        if result.pairs < MIN_PAIRS:
            yield f"Fewer than {MIN_PAIRS} pairs are always inconclusive."
        elif smallest >= ALPHA:
            yield (
                f"{result.pairs} pairs cannot show a difference in {others} comparisons at once: the smallest possible "
                f"corrected p is {smallest:.2g}. Use more pairs or fewer arms."
            )
    if result.seconds:
        each = ", ".join(f"{name} {figure(result.seconds[name], 2)}" for name in result.hosts if name in result.seconds)
        yield f"Seconds a host, by the clock; where starts are trained, the arm that plays first trains them: {each}."
    yield from result.caveats()
    controls = [f"{arm.name} is made for each host of {arm.control_of}" for arm in result.arms if arm.control_of]
    if controls:
        yield f"{'; '.join(controls)}. {_match(result)}".strip()


def smallest_p(pairs: int, comparisons: int) -> float:
    """Smallest corrected p value that ``pairs`` pairs can reach: 2 / 2^pairs times ``comparisons``, at most 1."""
    return float(min(1.0, comparisons * 2.0 ** (1 - pairs)))


def _match(result: ComparisonResult) -> str:
    """Describes how closely wider hosts match their target size, and longer training its target compute."""
    sentences = []
    for name, hosts in result.hosts.items():
        for cost, unit in (("parameters", "parameters"), ("flops", "FLOPs")):
            target = f"wanted_{cost}"
            off = [getattr(host, cost) / host.facts[target] - 1 for host in hosts if target in host.facts]
            if off:
                sentences.append(f"Relative to them, {name} has {min(off):+.1%} to {max(off):+.1%} {unit}.")
    return " ".join(sentences)


def _summaries(found: MetricResult) -> Table:
    digits = found.metric.decimals
    table = _table("mean", "std", "95 %", "IQM", "95 %")
    for name, summary in found.arms.items():
        mean, std, iqm = (figure(value, digits) for value in (summary.mean, summary.std, summary.iqm))
        around_mean, around_iqm = (interval(limits, digits) for limits in (summary.mean_interval, summary.iqm_interval))
        table.add_row(escape(name), mean, std, around_mean, iqm, around_iqm)
    return table


def _differences(found: MetricResult, means: bool = False) -> Table:
    """Each arm minus the reference, and the verdict; with ``means``, also the mean of each arm."""
    digits = found.metric.decimals
    table = _table(*(["mean"] if means else []), "difference", "95 %", "p", "verdict")
    for name, summary in found.arms.items():
        mean = [figure(summary.mean, digits)] if means else []
        compared = found.comparisons.get(name)
        if compared is None:
            table.add_row(escape(name), *mean, "", "", "", "reference")
            continue
        pair = compared.pair
        difference = (figure(pair.difference, digits, "+"), interval(pair.interval, digits, "+"))
        table.add_row(escape(name), *mean, *difference, f"{compared.adjusted_p:.2g}", compared.word)
    return table


def _effects(found: MetricResult) -> Table:
    """Statistics that do not affect the verdict."""
    table = _table("higher/same/lower", "d_z", "Mann-Whitney U", "its p")
    for name, compared in found.comparisons.items():
        pair = compared.pair
        counts, effect = f"{pair.wins}/{pair.ties}/{pair.losses}", figure(pair.effect_size, 2, "+")
        table.add_row(escape(name), counts, effect, f"{pair.mann_whitney_u:g}", f"{pair.mann_whitney_p:.2g}")
    return table


def _table(*headings: str) -> Table:
    """Returns a table with arms in the first column; only their names may wrap."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("arm", overflow="fold", min_width=9, max_width=20)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "verdict" else "right", no_wrap=True)
    return table


def _print(console: Console, table: Table) -> None:
    """Prints a table; if the console is too narrow for its columns, each arm with a line for each of its values."""
    if Measurement.get(console, console.options.update(max_width=1000), table).minimum <= console.width:
        console.print(table)
        return
    names = [str(column.header) for column in table.columns]
    for row in zip(*(column.cells for column in table.columns), strict=True):
        console.print(str(row[0]), style="bold")
        for name, value in zip(names[1:], row[1:], strict=True):
            if value:
                _line(console, f"  {name}: {value}")


def figure(value: float, digits: int, sign: str = "") -> str:
    """Formats ``value`` with ``digits`` decimals, fewer if it has more than two integer digits; "" if not finite."""
    if not math.isfinite(value):
        return ""
    before = len(f"{abs(value):.0f}")
    return f"{value:{sign},.{max(0, digits - max(0, before - 2))}f}"


def interval(limits: ConfidenceInterval, digits: int, sign: str = "") -> str:
    """``83.10..85.20``; empty if the interval is unbounded, as for a single pair."""
    if not math.isfinite(limits.high):
        return ""
    return f"{figure(limits.low, digits, sign)}..{figure(limits.high, digits, sign)}"


def _line(console: Console, text: str, soft_wrap: bool = False) -> None:
    # Verbatim: a slot or a path in brackets is not markup.
    console.print(text, markup=False, highlight=False, soft_wrap=soft_wrap)
