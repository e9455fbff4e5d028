"""Print what was measured, and on what."""

from rich.console import Console
from rich.table import Table

from esper.bench.runner import Result

UNITS = {"us": "µs"}
VERDICTS = {None: "", True: "met", False: "MISSED"}
COLUMNS = ("case", "size", "device", "baseline", "own", "baseline's", "ratio (10 % to 90 %)", "bar", "")
STYLES = {"met": "green", "MISSED": "red"}


def number(value: float) -> str:
    """About three digits that say something: ``12,345``, ``123.4``, ``1.23``."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def own_amount(result: Result) -> str:
    """``"6.30 µs (6.10 to 7.00)"``."""
    spread = f"({number(result.value_low)} to {number(result.value_high)})"
    return f"{number(result.value)} {UNITS.get(result.unit, result.unit)} {spread}"


def cells(result: Result) -> list[str]:
    """One row: medians, and in brackets the spread of the turns."""
    return [
        result.case,
        result.size,
        result.device,
        result.baseline,
        own_amount(result),
        number(result.baseline_value),
        f"{result.ratio:.2f} ({result.ratio_low:.2f} to {result.ratio_high:.2f})",
        "" if result.bar is None else f"{result.bar:g}",
        VERDICTS[result.met],
    ]


def print_results(results: list[Result], console: Console) -> None:
    """One row a comparison."""
    table = Table(*COLUMNS)
    for result in results:
        *row, verdict = cells(result)
        table.add_row(*row, f"[{STYLES[verdict]}]{verdict}[/]" if verdict else "")
    console.print(table)


def markdown(results: list[Result], heading: list[str]) -> str:
    """The same as a Markdown page, for `benchmarks/results`."""
    lines = ["# esper-bench", "", "```", *heading, "```", ""]
    lines += [f"| {' | '.join(row)} |" for row in (COLUMNS, ["---"] * len(COLUMNS), *map(cells, results))]
    return "\n".join(lines) + "\n"
