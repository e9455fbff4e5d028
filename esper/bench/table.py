"""Print what was measured, and on what."""

from rich.console import Console
from rich.table import Table

from esper.bench.runner import Result

UNITS = {"us": "µs"}


def own_amount(result: Result) -> str:
    """``"6.3 µs (6.1 to 7.0)"``."""
    spread = f"({result.value_low:.1f} to {result.value_high:.1f})"
    return f"{result.value:.1f} {UNITS.get(result.unit, result.unit)} {spread}"


def print_results(results: list[Result], console: Console) -> None:
    """One row a comparison; ratio and own amount as median (10 % to 90 %)."""
    table = Table("case", "size", "device", "baseline", "own", "baseline's", "ratio", "bar", "")
    for result in results:
        verdict = {None: "", True: "[green]met[/]", False: "[red]MISSED[/]"}[result.met]
        table.add_row(
            result.case,
            result.size,
            result.device,
            result.baseline,
            own_amount(result),
            f"{result.baseline_value:.1f}",
            f"{result.ratio:.2f} ({result.ratio_low:.2f} to {result.ratio_high:.2f})",
            "" if result.bar is None else f"{result.bar:g}",
            verdict,
        )
    console.print(table)


def markdown(results: list[Result], heading: list[str]) -> str:
    """The same as a Markdown page, for `benchmarks/results`."""
    lines = ["# esper-bench", "", "```", *heading, "```", ""]
    lines.append("| case | size | device | baseline | own | baseline's | ratio (10 % to 90 %) | bar | |")
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for r in results:
        verdict = {None: "", True: "met", False: "MISSED"}[r.met]
        lines.append(
            f"| {r.case} | {r.size} | {r.device} | {r.baseline} | {own_amount(r)} | {r.baseline_value:.1f} "
            f"| {r.ratio:.2f} ({r.ratio_low:.2f} to {r.ratio_high:.2f}) | {'' if r.bar is None else f'{r.bar:g}'} "
            f"| {verdict} |"
        )
    return "\n".join(lines) + "\n"
