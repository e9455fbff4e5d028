"""Prints the measurements and the environment they were made in."""

from rich.console import Console
from rich.table import Table

from esper.bench.runner import Result

UNITS = {"us": "µs"}
_LONG_US = 10_000
VERDICTS = {None: "", True: "met", False: "MISSED"}
COLUMNS = ("case", "size", "device", "baseline", "own", "baseline's", "ratio (10 % to 90 %)", "bar", "")
STYLES = {"met": "green", "MISSED": "red"}


def number(value: float) -> str:
    """Formats about three significant digits: ``12,345``, ``123.4``, ``1.23``."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def amounts(result: Result) -> tuple[str, str]:
    """Formats own and baseline values in one unit: ``"6.30 µs (6.10 to 7.00)", "63.0"``. Long times are in ms."""
    long = result.unit == "us" and result.value >= _LONG_US
    unit, scale = ("ms", 1e-3) if long else (UNITS.get(result.unit, result.unit), 1.0)
    own, low, high, other = (
        number(value * scale) for value in (result.value, result.value_low, result.value_high, result.baseline_value)
    )
    return f"{own} {unit} ({low} to {high})", other


def cells(result: Result) -> list[str]:
    """Returns one row: medians, with the spread of the turns in brackets."""
    return [
        result.case,
        result.size,
        result.device,
        result.baseline,
        *amounts(result),
        f"{result.ratio:.2f} ({result.ratio_low:.2f} to {result.ratio_high:.2f})",
        "" if result.bar is None else f"{result.bar:g}",
        VERDICTS[result.met],
    ]


def print_results(results: list[Result], console: Console) -> None:
    """Prints one row per comparison; the last line counts the bars that were met."""
    table = Table(*COLUMNS)
    for result in results:
        *row, verdict = cells(result)
        table.add_row(*row, f"[{STYLES[verdict]}]{verdict}[/]" if verdict else "")
    console.print(table)
    judged = [result.met for result in results if result.met is not None]
    console.print(f"{len(results)} measured; {sum(judged)} of {len(judged)} bars met", highlight=False)


def markdown(results: list[Result], heading: list[str]) -> str:
    """Returns the same table as a Markdown page, for `benchmarks/results`."""
    lines = ["# esper-bench", "", "```", *heading, "```", ""]
    lines += [f"| {' | '.join(row)} |" for row in (COLUMNS, ["---"] * len(COLUMNS), *map(cells, results))]
    return "\n".join(lines) + "\n"
