"""The report: one self-contained HTML file without scripts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from string import Template

from esper.config import ConfigError
from esper.files.atomic import write_atomic
from esper.report.accuracy import accuracy_section, capital
from esper.report.cost import time_section
from esper.report.curves import score_of
from esper.report.growth import contributions_section, lives_section
from esper.report.html import escape
from esper.report.learning import policy_section, reward_section
from esper.report.overview import configuration_section, events_section, summary_section
from esper.report.read import Run, open_runs
from esper.telemetry.score import ACCURACY

MARK = "<!-- a report of Esper -->"
"""Begins every report; only files with it may be replaced."""
STYLE = Path(__file__).with_name("report.css")
PAGE = Template(
    f"""<!doctype html>
{MARK}
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header><h1>$title</h1><p class=note>$about</p><nav aria-label="Parts of this report">$links</nav></header>
<main>$content</main>
<footer>$footer</footer>
</body>
</html>
"""
)
SECTIONS = {
    "summary": ("Summary", summary_section),
    "accuracy": ("Accuracy", accuracy_section),
    "slots": ("Slots", lives_section),
    "contributions": ("Contributions", contributions_section),
    "reward": ("Reward", reward_section),
    "policy": ("Agent", policy_section),
    "time": ("Time", time_section),
    "events": ("Events", events_section),
    "configuration": ("Configuration", configuration_section),
}
"""Name of the link to each section, and its content, by id."""


def report_html(runs: Sequence[Run]) -> str:
    """Returns the page about one run, or several side by side."""
    when = time.strftime("%Y-%m-%d %H:%M")
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    return PAGE.substitute(
        title=escape(f"Esper: {title}"),
        style=STYLE.read_text(encoding="utf-8"),
        about=escape("; ".join(f"{run.folder}: {run.state_words()}" for run in runs), 2000),
        links="".join(f'<a href="#{name}">{words}</a>' for name, words in _links(runs).items()),
        content="".join(content(runs) for _, content in SECTIONS.values()),
        footer=escape(f"Made {when}. {_units(runs)}"),
    )


def _links(runs: Sequence[Run]) -> dict[str, str]:
    """Returns the words of the link to each section, by id."""
    return {name: words for name, (words, _) in SECTIONS.items()} | {"accuracy": escape(capital(score_of(runs).name))}


def _units(runs: Sequence[Run]) -> str:
    """Returns a sentence about the units of scores."""
    score = score_of(runs)
    if score == ACCURACY:
        return "Accuracies are percentages, differences percentage points (pp)."
    unit = score.unit or "its own unit"
    return f"{score.name} and its differences are in {unit}; rewards count {score.points:g} percentage points for 1."


def default_file(folders: Sequence[Path]) -> Path:
    """Returns report.html in the run's folder, or in the working directory for several runs."""
    return folders[0] / "report.html" if len(folders) == 1 else Path("report.html")


def write_report(folders: Sequence[Path], file: Path | None = None) -> Path:
    """Writes the report about the runs in ``folders`` and returns its path.

    Raises:
        ConfigError: a folder holds no run, or ``file`` cannot be written or is not an earlier report.
    """
    runs = open_runs(folders)
    path = file or default_file(folders)
    check_file(path)
    try:
        write_atomic(path, report_html(runs).encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; give another --out") from None
    return path


def check_file(path: Path) -> None:
    """Raises ConfigError unless ``path`` is new in an existing folder, or an earlier report."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--out {path}: give a file in an existing folder, such as {path / 'report.html'}")
    if not path.exists():
        return
    with path.open("rb") as file:
        head = file.read(200).decode("utf-8", "replace")
    if head and MARK not in head:
        raise ConfigError(f"{path} already exists and is not an Esper report; give another --out")
