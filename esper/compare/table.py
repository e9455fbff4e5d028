"""Text report of a comparison: one table per metric, readable at 80 columns, and a verdict in words."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from esper.compare.analysis import MetricResult
from esper.compare.comparison import ComparisonResult
from esper.compare.folder import RESULTS, resume_command
from esper.compare.plots import save_plots
from esper.compare.publish import save_tables
from esper.compare.statistics import ALPHA, MIN_PAIRS, ConfidenceInterval
from esper.files.atomic import write_atomic
from esper.show.console import TerminalConsole
from esper.telemetry.text import count, p_value

TABLE = "table.txt"
MIN_NAME = 9
MAX_NAME = 36
"""Width of the column of arms, in characters."""
NONE = "-"
"""Shown for a number that does not exist."""
DIRECTION = {"higher": "higher is better", "lower": "lower is better", "neither": "neither direction is better"}


def write_report(result: ComparisonResult, console: Console) -> None:
    """Prints the report, then writes the full version and the plots next to the results and prints their names.

    If matplotlib is missing or fails, there are no plots and the output says so.
    """
    print_report(result, console)
    folder = result.folder
    # The width of the file does not depend on the terminal.
    text = io.StringIO()
    print_report(result, TerminalConsole(file=text, width=100), full=True)
    write_atomic(folder / TABLE, text.getvalue().encode())
    files = [folder / RESULTS, folder / TABLE]
    files += save_tables(result, folder)
    missing = ""
    try:
        files += save_plots(result, folder)
    except ImportError as error:
        missing = f" No plots: matplotlib cannot be imported ({error}); pip install matplotlib."
    except Exception as error:  # such as a broken font or a full disk: the tables are written, and say the same
        missing = f" Plots are missing: {type(error).__name__}: {error}."
    names = ", ".join(file.name for file in files)
    _line(console, f"Written to {folder}: {names}.{missing}", soft_wrap=True)  # a path stays in one piece


def print_report(result: ComparisonResult, console: Console, full: bool = False) -> None:
    """Prints the first metric in full and the others as one table each; with ``full``, all of them in full."""
    pairs = counted(result)
    if result.pairs < result.requested_pairs:
        if result.train_seeds is None:
            pairs = f"{result.pairs} of {result.requested_pairs} requested pairs"
        else:
            pairs = f"{pairs} ({result.requested_seeds} training seeds were requested)"
    width = "" if result.width is None else f", width {result.width}"
    _line(console, f"Committed hosts of {result.task} after their last epoch: {pairs}, seed {result.seed}{width}")
    for number, metric_result in enumerate(result.metrics):
        metric = metric_result.metric
        _line(console, "")
        if metric_result.missing:
            _line(console, f"{metric.title}: {metric_result.missing}")
            continue
        common = metric.common(result.hosts)
        if common is not None:
            _line(console, f"{metric.title}: {figure(common, metric.decimals)} for every host")
            continue
        if not metric.judged:
            _line(console, f"{metric.label}, which says how large hosts are; no verdict")
            _print(console, _summaries(metric_result))
            continue
        _line(console, f"{metric.label} ({DIRECTION[metric.better]})")
        if full or number == 0:
            _print_full(console, metric_result)
        else:
            _print(console, _differences(metric_result, means=True))
    _line(console, "")
    for note in _notes(result):
        _line(console, note)


def _print_full(console: Console, result: MetricResult) -> None:
    """Prints all tables of a metric, and the verdicts as sentences."""
    for table in (_summaries(result), _differences(result), _effects(result)):
        _line(console, "")
        _print(console, table)
    _line(console, "")
    for comparison in result.comparisons.values():
        pair = comparison.pair
        _line(console, f"{pair.name_a} against {pair.name_b}: {comparison.verdict}")


def counted(result: ComparisonResult) -> str:
    """Returns the size of the comparison: ``10 pairs``, or ``5 training seeds of 16 hosts each``."""
    if result.train_seeds is None:
        return count(result.pairs, "pair")
    seeds = count(result.train_seeds, "training seed")
    hosts = count(result.pairs // result.train_seeds, "host")
    return f"{seeds} of {hosts} each"


def _notes(result: ComparisonResult) -> Iterator[str]:
    """Yields the sentences that a reader needs to interpret the numbers."""
    others = len(result.arms) - 1
    together = f"{count(others, 'comparison')} per metric (Holm)"
    if result.train_seeds is None:
        complete = f"{result.pairs} of {result.requested_pairs} pairs"
        yield (
            f"Differences are arm minus {result.reference}, pair by pair. The verdict is that of the paired sign-flip "
            f"test, with p corrected for {together}. IQM: interquartile mean; intervals: bootstrap, 95 %."
        )
    else:
        complete = f"{result.train_seeds} of {result.requested_seeds} training seeds"
        learning = ", ".join(arm.name for arm in result.arms if arm.learns)
        yield (
            f"{learning}: trained with each training seed, on the same hosts, then playing greedily on "
            f"held-out hosts of that seed. Differences are arm minus {result.reference}. The unit of evidence is the "
            "training seed: std, IQM and the paired t test are over the means of seeds, and intervals are bootstrap, "
            f"95 %, of seeds and of hosts within them. p is corrected for {together}."
        )
    if result.pairs < result.requested_pairs:
        yield f"Only {complete} are complete. To continue: {resume_command(result.folder, result.arms)}"
    if result.train_seeds is None:
        yield from _weakness(result.pairs, others)
    if result.seconds:
        taken = ", ".join(
            f"{name} {figure(result.seconds[name], 2)}" for name in result.hosts if name in result.seconds
        )
        yield f"Seconds a host, by the clock; where starts are trained, the arm that plays first trains them: {taken}."
    copies = []
    for name, hosts in result.hosts.items():
        if result.pairs > 1 and result.metrics[0].metric.common({name: hosts}) is not None:
            copies.append(name)
    if copies:
        reason = "There is no interval, and no p where all pairs differ by the same number."
        if any(comparison.pair.copies for comparison in result.metrics[0].comparisons.values()):
            reason = "Such simulated hosts are copies of one host, which are no sample: there is no verdict."
        yield f"{', '.join(copies)}: all hosts have the same result. {reason}"
    yield from result.caveats()
    # Controls are said to be made for an arm, and how well they match it.
    controls = [f"{arm.name} is made for each host of {arm.control_of}" for arm in result.arms if arm.control_of]
    if controls:
        yield f"{'; '.join(controls)}. {_match(result)}".strip()


def _weakness(pairs: int, comparisons: int) -> Iterator[str]:
    """Yields the reason that no difference can be shown by so few pairs, if there is one."""
    smallest = smallest_p(pairs, comparisons)
    if pairs < MIN_PAIRS:
        yield f"Fewer than {MIN_PAIRS} pairs are always inconclusive."
    elif smallest >= ALPHA:
        yield (
            f"{pairs} pairs cannot show a difference in {comparisons} comparisons at once: the smallest possible "
            f"corrected p is {p_value(smallest)}. Use more pairs or fewer arms."
        )


def smallest_p(pairs: int, comparisons: int) -> float:
    """Smallest corrected p value that ``pairs`` pairs can reach: 2 / 2^pairs times ``comparisons``, at most 1."""
    return float(min(1.0, comparisons * 2.0 ** (1 - pairs)))


def _match(result: ComparisonResult) -> str:
    """Describes how closely wider hosts match their target size, and longer training its target compute."""
    sentences = []
    for name, hosts in result.hosts.items():
        for cost, unit in (("parameters", "parameters"), ("flops", "FLOPs")):
            target = f"wanted_{cost}"
            # Deviations from the target, as parts of it.
            off = [getattr(host, cost) / host.facts[target] - 1 for host in hosts if target in host.facts]
            if off:
                sentences.append(f"Relative to them, {name} has {min(off):+.1%} to {max(off):+.1%} {unit}.")
    return " ".join(sentences)


def _summaries(result: MetricResult) -> Table:
    """Mean and interquartile mean of each arm, with their intervals."""
    digits = result.metric.decimals
    table = _table("mean", "std", "95 %", "IQM", "95 %")
    for name, summary in result.arms.items():
        table.add_row(
            escape(name),
            figure(summary.mean, digits),
            figure(summary.std, digits),
            interval(summary.mean_interval, digits),
            figure(summary.iqm, digits),
            interval(summary.iqm_interval, digits),
        )
    return table


def _differences(result: MetricResult, means: bool = False) -> Table:
    """Each arm minus the reference, and the verdict; with ``means``, also the mean of each arm."""
    digits = result.metric.decimals
    headings = ["difference", "95 %", "p", "verdict"]
    if means:
        headings.insert(0, "mean")
    table = _table(*headings)
    for name, summary in result.arms.items():
        cells = [escape(name)]  # a name in brackets is not markup
        if means:
            cells.append(figure(summary.mean, digits))
        comparison = result.comparisons.get(name)
        if comparison is None:
            cells += ["", "", "", "reference"]
        else:
            cells += [
                figure(comparison.pair.difference, digits, "+"),
                interval(comparison.pair.interval, digits, "+"),
                p_value(comparison.adjusted_p),
                comparison.word,
            ]
        table.add_row(*cells)
    return table


def _effects(result: MetricResult) -> Table:
    """Statistics that do not affect the verdict."""
    table = _table("higher/same/lower", "d_z", "Mann-Whitney U", "its p")
    for name, comparison in result.comparisons.items():
        pair = comparison.pair
        table.add_row(
            escape(name),
            f"{pair.wins}/{pair.ties}/{pair.losses}",
            figure(pair.effect_size, 2, "+") or NONE,
            NONE if pair.copies else f"{pair.mann_whitney_u:g}",
            p_value(pair.mann_whitney_p),
        )
    return table


def _table(*headings: str) -> Table:
    """Returns a table with arms in the first column; only their names may wrap, if they are very long."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("arm", overflow="fold", max_width=MAX_NAME)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "verdict" else "right", no_wrap=True)
    return table


def _print(console: Console, table: Table) -> None:
    """Prints a table; if the console is too narrow for its columns, each arm with a line for each of its values."""
    unlimited = console.options.update(max_width=1000)
    names = table.columns[0]
    longest = max(len(str(cell)) for cell in names.cells)
    names.min_width = min(max(longest, MIN_NAME), MAX_NAME)  # no name is broken to make room for numbers
    if Measurement.get(console, unlimited, table).minimum <= console.width:
        console.print(table)
        return
    # A paragraph for each arm; cells that are empty in the table are left out.
    arms, *columns = table.columns
    for row, arm in enumerate(arms.cells):
        console.print(str(arm), style="bold")
        for column in columns:
            value = list(column.cells)[row]
            if value:
                _line(console, f"  {column.header}: {value}")


def figure(value: float, digits: int, sign: str = "") -> str:
    """Formats ``value`` with ``digits`` decimals, fewer if it has more than two integer digits; "" if not finite."""
    if not math.isfinite(value):
        return ""
    # Each integer digit beyond the second one takes the place of a decimal.
    integer_digits = len(f"{abs(value):.0f}")
    decimals = max(0, digits - max(0, integer_digits - 2))
    return f"{value:{sign}z,.{decimals}f}"


def interval(limits: ConfidenceInterval, digits: int, sign: str = "") -> str:
    """``83.10..85.20``; empty if the interval is unbounded, as for a single pair, and a dash if there is no spread."""
    if not math.isfinite(limits.high):
        return ""
    if limits.low == limits.high:
        return NONE
    low = figure(limits.low, digits, sign)
    high = figure(limits.high, digits, sign)
    return f"{low}..{high}"


def _line(console: Console, text: str, soft_wrap: bool = False) -> None:
    # Verbatim: a slot or a path in brackets is not markup.
    console.print(text, markup=False, highlight=False, soft_wrap=soft_wrap)
