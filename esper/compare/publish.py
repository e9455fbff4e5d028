"""The tables of a comparison for papers: all numbers as CSV, and the primary metric as a LaTeX table."""

from __future__ import annotations

import csv
import io
import math
import re
from pathlib import Path

from esper.compare.comparison import ComparisonResult
from esper.compare.statistics import ConfidenceInterval
from esper.files.atomic import write_atomic
from esper.telemetry.text import p_value

CSV = "table.csv"
LATEX = "table.tex"
COLUMNS = (
    "metric",
    "unit",
    "arm",
    "mean",
    "std",
    "mean_low",
    "mean_high",
    "iqm",
    "iqm_low",
    "iqm_high",
    "reference",
    "difference",
    "difference_low",
    "difference_high",
    "adjusted_p",
    "verdict",
)
"""Columns of the CSV file; intervals are at 95 %. The last five are empty for the reference."""
SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}
"""Characters that LaTeX cannot escape with a backslash."""


def save_tables(result: ComparisonResult, folder: Path) -> list[Path]:
    """Writes both tables to ``folder`` and returns their paths. Metrics without results are left out."""
    texts = {folder / CSV: csv_table(result), folder / LATEX: latex_table(result)}
    for file, text in texts.items():
        write_atomic(file, text.encode())
    return list(texts)


def csv_table(result: ComparisonResult) -> str:
    """Returns one row per metric and arm, with unrounded numbers."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for metric_result in result.metrics:
        metric = metric_result.metric
        for name, arm in metric_result.arms.items():
            row = [
                metric.name,
                metric.unit,
                name,
                arm.mean,
                arm.std,
                *arm.mean_interval,
                arm.iqm,
                *arm.iqm_interval,
                result.reference,
            ]
            comparison = metric_result.comparisons.get(name)
            if comparison is not None:
                row += [
                    comparison.pair.difference,
                    *comparison.pair.interval,
                    comparison.adjusted_p,
                    comparison.word,
                ]
            row += [""] * (len(COLUMNS) - len(row))  # the reference is compared with nothing
            writer.writerow(row)
    return text.getvalue()


def latex_table(result: ComparisonResult) -> str:
    """Returns a tabular of the primary metric, with the rules of the package booktabs."""
    primary = result.metrics[0]
    digits = primary.metric.decimals
    lines = [
        f"% {result.pairs} pairs, seed {result.seed}; 95 % bootstrap intervals; p corrected (Holm)",
        r"\begin{tabular}{lrrrl}",
        r"\toprule",
        rf"Arm & {latex(primary.metric.label)} & Difference & $p$ & Verdict \\",
        r"\midrule",
    ]
    for name, arm in primary.arms.items():
        mean = f"{_number(arm.mean, digits)} {_interval(arm.mean_interval, digits)}"
        difference = ""
        p = ""
        verdict = "reference"
        comparison = primary.comparisons.get(name)
        if comparison is not None:
            pair = comparison.pair
            difference = f"{_number(pair.difference, digits, '+')} {_interval(pair.interval, digits, '+')}"
            p = p_value(comparison.adjusted_p).replace("<", "$<$")
            verdict = comparison.word
        lines.append(rf"{latex(name)} & {mean} & {difference} & {p} & {verdict} \\")
    # The empty line ends the file with a line end.
    lines += [r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)


def latex(text: str) -> str:
    """Escapes the characters that LaTeX would interpret."""
    # In one pass: the braces of a replacement stay as they are.
    return re.sub(r"[\\~^&%$#_{}]", lambda match: SPECIAL.get(match[0], rf"\{match[0]}"), text)


def _number(value: float, digits: int, sign: str = "") -> str:
    return f"${value:{sign}z.{digits}f}$"


def _interval(limits: ConfidenceInterval, digits: int, sign: str = "") -> str:
    """Returns the interval in brackets; empty if it is unbounded, as for a single pair."""
    if not math.isfinite(limits.high - limits.low):
        return ""
    low = _number(limits.low, digits, sign)
    high = _number(limits.high, digits, sign)
    return f"[{low}, {high}]"
