"""The report: one self-contained HTML file without scripts."""

from __future__ import annotations

import html
import time
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from string import Template

from esper.config import ConfigError
from esper.files.atomic import write_atomic
from esper.show.accuracy import accuracy_section, capital
from esper.show.cost import time_section
from esper.show.curves import score_of
from esper.show.growth import contributions_section, lives_section
from esper.show.html import escape
from esper.show.learning import policy_section, reward_section
from esper.show.overview import configuration_section, events_section, summary_section
from esper.show.read import Runs, is_comparison, open_runs, saved_tables
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
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
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
    "summary": summary_section,
    "accuracy": accuracy_section,
    "slots": lives_section,
    "contributions": contributions_section,
    "reward": reward_section,
    "agent": policy_section,
    "time": time_section,
    "events": events_section,
    "configuration": configuration_section,
}
"""Content of each section, by its id, which is also the name of its link."""


def report_html(runs: Runs) -> str:
    """Returns the page about one run, or several side by side."""
    title = ", ".join(run.name for run in runs)
    if len(runs) > 1:
        title = f"{len(runs)} runs: {title}"
    about = "; ".join(f"{run.folder}: {run.state_words()}" for run in runs)
    links = ""
    content = ""
    for name, section in SECTIONS.items():
        link = score_of(runs).name if name == "accuracy" else name
        links += f'<a href="#{name}">{escape(capital(link))}</a>'
        content += section(runs)
    return _page(title, about, content, links, f" {_units(runs)}")


def comparison_html(folder: Path) -> str:
    """Returns the page about a comparison: its pictures and its tables. Raises ConfigError if it has no result yet."""
    images = ""
    for name in ("pairs", "differences", "cost"):
        file = folder / f"{name}.svg"
        if file.is_file():
            data = b64encode(file.read_bytes()).decode()
            images += f'<img alt="{name}" src="data:image/svg+xml;base64,{data}">'
    tables = html.escape(saved_tables(folder))
    content = f"<section><h2>Pictures</h2>{images}</section>"
    content += f"<section><h2>Tables</h2><div class=scroll tabindex=0><pre>{tables}</pre></div></section>"
    return _page(folder.absolute().name, f"{folder}: a comparison", content)


def _page(title: str, about: str, content: str, links: str = "", footer: str = "") -> str:
    """Returns the whole page; ``content`` and ``links`` are HTML, the others text."""
    return PAGE.substitute(
        title=escape(f"Esper: {title}"),
        style=STYLE.read_text(encoding="utf-8"),
        about=escape(about, 2000),
        links=links,
        content=content,
        footer=escape(f"Made {time.strftime('%Y-%m-%d %H:%M')}.{footer}"),
    )


def _units(runs: Runs) -> str:
    """Returns a sentence about the units of scores."""
    score = score_of(runs)
    if score == ACCURACY:
        return "Accuracies are percentages, differences percentage points (pp)."
    unit = score.unit or "its own unit"
    return f"{score.name} and its differences are in {unit}; rewards count {score.points:g} percentage points for 1."


def write_report(folders: Sequence[Path], file: Path | None = None) -> Path:
    """Writes the report about the runs, or the one comparison, in ``folders`` and returns its path.

    Without ``file``, it is report.html in the run's folder, or in the working directory for several runs.

    Raises:
        ConfigError: a folder holds no run, a comparison has no result or is one of several folders, or ``file`` cannot
            be written or is not an earlier report.
    """
    page = _page_about(folders)
    path = file
    if path is None:
        parent = folders[0] if len(folders) == 1 else Path()
        path = parent / "report.html"
    check_file(path)
    try:
        write_atomic(path, page.encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; give another --out") from None
    return path


def _page_about(folders: Sequence[Path]) -> str:
    if len(folders) == 1 and is_comparison(folders[0]):
        return comparison_html(folders[0])
    return report_html(open_runs(folders))


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
