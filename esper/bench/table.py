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
_LONG_US = 10_000


def number(value: float) -> str:
    """Formats about three significant digits: ``12,345``, ``123.4``, ``1.23``."""
    digits = 2
    if abs(value) >= 10:
        digits = 1
    if abs(value) >= 1000:
        digits = 0
    return f"{value:,.{digits}f}"


def cells(result: Result) -> list[str]:
    """Returns one row: medians, with the spread of the turns in brackets. Long times are in ms."""
    unit = result.unit
    scale = 1.0
    if unit == "us":
        unit = "µs"
        if result.value >= _LONG_US:
            unit = "ms"
            scale = 1e-3
    values = (result.value, result.value_low, result.value_high, result.baseline_value)
    own, low, high, other = (number(value * scale) for value in values)
    verdict = _VERDICTS[result.met]
    if not result.usable:
        verdict = "baseline unsteady"
    return [
        result.case,
        result.size,
        result.device,
        result.baseline,
        f"{own} {unit} ({low} to {high})",
        other,
        f"{result.ratio:.2f} ({result.ratio_low:.2f} to {result.ratio_high:.2f})",
        "" if result.bar is None else f"{result.bar:g}",
        verdict,
    ]


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
    rows: list[Sequence[str]] = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, results)]
    lines = ["# esper-bench", "", "```", *heading, "```", ""]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"
