"""The measurements as a table: in the terminal, and as a Markdown page."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from esper.bench.runner import Result

COLUMNS = (
    "case",
    "size",
    "device",
    "baseline",
    "own",
    "baseline's",
    "ratio (10 % to 90 %)",
    "bar",
    "",  # the verdict
)
_VERDICTS = {None: "", True: "met", False: "MISSED"}
_UNUSABLE = "baseline unsteady"
_LONG_US = 10_000


def number(value: float) -> str:
    """Formats about three significant digits: ``12,345``, ``123.4``, ``1.23``."""
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:,.1f}"
    return f"{value:,.2f}"


def cells(result: Result) -> list[str]:
    """Returns one row: medians, with the spread of the turns in brackets. Long times are in ms."""
    unit, scale = _unit_and_scale(result)
    own = number(result.value * scale)
    low = number(result.value_low * scale)
    high = number(result.value_high * scale)
    return [
        result.case,
        result.size,
        result.device,
        result.baseline,
        f"{own} {unit} ({low} to {high})",
        number(result.baseline_value * scale),
        f"{result.ratio:.2f} ({result.ratio_low:.2f} to {result.ratio_high:.2f})",
        "" if result.bar is None else f"{result.bar:g}",
        _VERDICTS[result.met] if result.usable else _UNUSABLE,
    ]


def _unit_and_scale(result: Result) -> tuple[str, float]:
    """Returns the unit that is printed, and the factor by which values are multiplied for it."""
    if result.unit != "us":
        return result.unit, 1.0
    if result.value >= _LONG_US:
        return "ms", 1e-3
    return "µs", 1.0


def print_results(results: list[Result], console: Console) -> None:
    """Prints one row per comparison; the last line counts the bars that were met."""
    table = Table(*COLUMNS)
    for result in results:
        *row, verdict = cells(result)
        table.add_row(*row, Text(verdict, "green" if result.met else "red"))
    console.print(table)
    judged = [result.met for result in results if result.met is not None]
    console.print(f"{len(results)} measured; {sum(judged)} of {len(judged)} bars met", highlight=False)


def markdown(results: list[Result], heading: list[str]) -> str:
    """Returns the same table as a Markdown page, for `benchmarks/results`."""
    lines = ["# esper-bench", "", "```", *heading, "```", ""]
    lines.append(_markdown_row(COLUMNS))
    lines.append(_markdown_row(["---"] * len(COLUMNS)))
    lines += [_markdown_row(cells(result)) for result in results]
    return "\n".join(lines) + "\n"


def _markdown_row(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"
