"""The full report of a comparison, written into its folder."""

from __future__ import annotations

import io

from rich.console import Console

from esper.evaluation.comparison import Outcome
from esper.evaluation.folder import RESULTS
from esper.evaluation.plots import save_plots
from esper.evaluation.table import print_report
from esper.files.atomic import write_atomic

TABLE = "table.txt"


def write_report(outcome: Outcome, console: Console) -> None:
    """Prints the report, then writes the full version and the plots next to the results and prints their names.

    Without matplotlib, no plots are drawn and the output says so.
    """
    print_report(outcome, console)
    text = io.StringIO()
    print_report(outcome, Console(file=text, width=100), full=True)
    write_atomic(outcome.folder / TABLE, text.getvalue().encode())
    try:
        plots = [file.name for file in save_plots(outcome, outcome.folder)]
        missing = ""
    except ImportError as error:
        plots, missing = [], f" No plots: matplotlib cannot be imported ({error}); pip install matplotlib."
    files = ", ".join([RESULTS, TABLE, *plots])
    told = f"Written to {outcome.folder}: {files}.{missing}"
    console.print(told, markup=False, highlight=False, soft_wrap=True)
