"""The tables of a comparison for papers: all numbers as CSV, and the primary metric as a LaTeX table."""

from __future__ import annotations

import csv
import io
import math
import re
from pathlib import Path

from esper.evaluation.comparison import ComparisonResult
from esper.files.atomic import write_atomic

CSV, LATEX = "table.csv", "table.tex"
COLUMNS = (
    "metric", "unit", "arm", "mean", "std", "mean_low", "mean_high", "iqm", "iqm_low", "iqm_high", "reference",
    "difference", "difference_low", "difference_high", "adjusted_p", "verdict",
)  # fmt: skip
"""Columns of the CSV file; intervals are at 95 %. The last five are empty for the reference."""
SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}


def save_tables(result: ComparisonResult, folder: Path) -> list[Path]:
    """Writes both tables to ``folder`` and returns their paths. Metrics without results are left out."""
    files = []
    for name, text in ((CSV, csv_table(result)), (LATEX, latex_table(result))):
        files.append(folder / name)
        write_atomic(files[-1], text.encode())
    return files


def csv_table(result: ComparisonResult) -> str:
    """Returns one row per metric and arm, with unrounded numbers."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for found in result.metrics:
        for name, arm in found.arms.items():
            row = [found.metric.name, found.metric.unit, name, arm.mean, arm.std, *arm.mean_interval]
            row += [arm.iqm, *arm.iqm_interval, result.reference]
            if compared := found.comparisons.get(name):
                row += [compared.pair.difference, *compared.pair.interval, compared.adjusted_p, compared.word]
            writer.writerow([*row, *[""] * (len(COLUMNS) - len(row))])
    return text.getvalue()


def latex_table(result: ComparisonResult) -> str:
    """Returns a tabular of the primary metric, with the rules of the package booktabs."""
    found = result.metrics[0]
    digits = found.metric.decimals
    lines = [
        f"% {result.pairs} pairs, seed {result.seed}; 95 % bootstrap intervals; p corrected (Holm)",
        r"\begin{tabular}{lrrrl}",
        r"\toprule",
        rf"Arm & {latex(found.metric.label)} & Difference & $p$ & Verdict \\",
        r"\midrule",
    ]
    for name, arm in found.arms.items():
        cells = [latex(name), f"{_number(arm.mean, digits)} {_interval(*arm.mean_interval, digits)}"]
        if compared := found.comparisons.get(name):
            pair = compared.pair
            difference = f"{_number(pair.difference, digits, '+')} {_interval(*pair.interval, digits, '+')}"
            cells += [difference, f"{compared.adjusted_p:.2g}", compared.word]
        else:
            cells += ["", "", "reference"]
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def latex(text: str) -> str:
    """Escapes the characters that LaTeX would interpret."""
    return re.sub(r"[\\~^&%$#_{}]", lambda match: SPECIAL.get(match[0], rf"\{match[0]}"), text)


def _number(value: float, digits: int, sign: str = "") -> str:
    return f"${value:{sign}.{digits}f}$"


def _interval(low: float, high: float, digits: int, sign: str = "") -> str:
    """Returns the interval in brackets; empty if it is unbounded, as for a single pair."""
    if not math.isfinite(high - low):
        return ""
    return f"[{_number(low, digits, sign)}, {_number(high, digits, sign)}]"
