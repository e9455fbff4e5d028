"""The report: one self-contained HTML file without scripts, from a template."""

from __future__ import annotations

import json
import math
import re
import time
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from html import escape
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper.agents.spec import ALONE, UNTRAINED
from esper.config import ConfigError
from esper.files.atomic import write_atomic
from esper.show.charts import Block, Chart, Intervals, Line, Picture, SlotLanes, Table, interval_chart, line_chart, note
from esper.show.console import size
from esper.show.life import HostLife, best_life, lanes_chart, life_chart
from esper.show.read import Run, Runs, is_comparison, open_runs, saved_tables
from esper.show.sections import capital, sections
from esper.show.view import RunView
from esper.telemetry import event as events
from esper.telemetry.score import ACCURACY, ScoreUnit
from esper.telemetry.text import clean, count, p_value

if TYPE_CHECKING:
    from jinja2 import Template

MARK = "<!-- a report of Esper -->"
"""Begins every report; only files with it may be replaced."""
TITLES = {
    "verdict": "Result",
    "agent": "The agent",
    "time": "Where the time went",
    "events": "Actions and events",
}
"""Titles of sections; those of the others are their names."""


@cache
def template() -> Template:
    """Returns the template of the page, in which every text is cleaned and escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # only reports need it
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        if isinstance(value, Markup):
            return value
        return clean(value, 2000)

    def lines(text: str) -> Markup:
        return Markup("\n").join(clean(line, 2000) for line in text.splitlines())

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        loader=FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
    )
    environment.tests["numeric"] = lambda cell: re.match(r"[+\-]?[\d.]", str(cell)) is not None
    environment.filters["lines"] = lines
    environment.filters["base64"] = lambda content: Markup(b64encode(content).decode())
    environment.filters["capital"] = capital
    environment.filters["drawn"] = drawn
    return environment.get_template("report.html")


def drawn(figure: Chart | Intervals | SlotLanes | HostLife) -> Picture:
    """Draws a figure; a picture that fails says why, and the rest of the page is written."""
    try:
        return _drawn(figure)
    except ImportError:
        raise
    except Exception as error:  # such as a font that matplotlib cannot read
        words = clean(f"not drawn: {type(error).__name__}: {error}")
        box = '<svg xmlns="http://www.w3.org/2000/svg" width="600" height="24">'
        return Picture(f'{box}<text y="16" font-size="12">{escape(words)}</text></svg>'.encode(), words)


def _drawn(figure: Chart | Intervals | SlotLanes | HostLife) -> Picture:
    match figure:
        case Chart():
            return line_chart(figure.title, figure.lines, figure.x_label, figure.y_label)
        case Intervals():
            return interval_chart(figure.title, figure.rows, figure.label, figure.unit)
        case SlotLanes():
            return lanes_chart(figure.view, figure.title)
    return life_chart(figure)


def report_html(runs: Runs) -> str:
    """Returns the page about one run, or several side by side."""
    views = [run.view for run in runs]
    title = ", ".join(run.name for run in runs)
    if len(runs) > 1:
        title = f"{len(runs)} runs: {title}"
    answers = []
    about = []
    problems = []
    for run in runs:
        words = answer(run.view)
        if len(runs) > 1:
            words = f"{run.name}: {words}"
        answers.append(words)
        problems.append((run.name, run.all_problems()))
        started = run.last(events.RunStarted)
        said = [f"{run.folder}: {run.state_words()}"]
        for name, value in run.about.items():
            said.append(f"{name} {value}")
        if started is not None:
            said += size(started)
        about.append("; ".join(said))
    lives: list[Any] = list(filter(None, map(best_life, views)))
    blocks = joined(runs)
    blocks["verdict"] = [*lives, *blocks.get("verdict", [note("Nothing was compared yet.")])]
    blocks["configuration"] = configuration(runs)
    content = []
    for name, found in blocks.items():
        link = TITLES.get(name, name)
        if name == "accuracy":
            score = score_of(views)
            link = f"accuracy and {score.name}" if score.priced else score.name
        content.append((name, capital(link), found))
    return _page(title, about, content, answers=answers, footer=units(views), problems=problems)


def answer(view: RunView) -> str:
    """Answers the questions of a run: whether growth made the host better, at which size, beside what; and whether an
    agent that learned is better than itself untrained.

    Hosts left alone are what the grown ones are compared with, else the first of the others.
    """
    score = view.score
    completed = view.last(events.RunCompleted)
    if completed is None or not completed.comparisons:
        return _not_compared(view)
    others = {comparison.reference: comparison for comparison in completed.comparisons}
    found = others.get(ALONE, completed.comparisons[0])
    other = f"the same hosts under {found.reference}"
    if found.reference == ALONE:
        other = "the same hosts left alone"
    verdict, _, _ = found.verdict.partition(" (")
    evidence = _evidence(found, score, count(completed.pairs, "pair"))
    begin = "Whether growth helps is open"
    if " is better by " in verdict and found.difference > 0:
        begin = "Growth helped"
    elif " is better by " in verdict and found.difference < 0:
        begin = "Growth hurt"
    size = (
        f"with {completed.parameters:,.0f} parameters instead of {completed.host_parameters:,}; hosts that have as "
        "many from the start were not compared"
    )
    if not completed.fossils:
        size = "although no seed was kept"
    return (
        f"{begin}: grown by {completed.controller}, hosts reached a test {score.name} of "
        f"{score.value(found.accuracy)}, {other} {score.value(found.reference_accuracy)}: "
        f"{score.difference(found.difference)} ({evidence}), {size}."
        f"{_learning(others.get(UNTRAINED), score)}"
    )


def _evidence(found: events.Comparison, score: ScoreUnit, *more: str) -> str:
    """Returns the interval and p of a comparison; the reason if it has no p."""
    if math.isnan(found.p_value):
        return found.verdict
    low = score.difference(found.low, unit=False)
    high = score.difference(found.high, unit=False)
    return ", ".join((f"95 % interval {low} to {high}", f"p {p_value(found.p_value, '= ')}", *more))


def _learning(found: events.Comparison | None, score: ScoreUnit) -> str:
    """Returns a sentence on an agent and itself untrained, after a space; "" if that was not compared."""
    if found is None:
        return ""
    verdict, _, _ = found.verdict.partition(" (")
    begin = "Whether learning helped is open"
    if " is better by " in verdict:
        begin = f"Learning made the agent {'better' if found.difference > 0 else 'worse'}"
    gap = score.difference(found.difference)
    return f" {begin}: {gap} against the agent untrained ({_evidence(found, score)})."


def _not_compared(view: RunView) -> str:
    last = view.last(events.RoundCompleted)
    if last is None:
        return "Nothing was compared yet: no round is completed."
    found = view.compared(last)
    when = f"after round {last.round} of {last.rounds}"
    grown = f"grown hosts have a {found.split} {found.score.name} of {found.score.value(found.grown)}"
    words = f"Nothing was compared yet; {when}, {grown}"
    if found.other is not None:
        words += f", {found.name} {found.score.value(found.other)}"
    return f"{words}."


def _page(title: str, about: Sequence[str], content: Sequence[Any], **more: Any) -> str:
    """Returns the page; ``content`` is the id, the title and the blocks of each section."""
    values = {
        "title": title,
        "about": about,
        "content": content,
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "answers": [],
        "footer": "",
        "problems": [],
        "text": "",
        "images": [],
    }
    return template().render(values | more)


def joined(runs: Runs) -> dict[str, list[Block]]:
    """Returns the blocks of each section; charts of several runs that have the same title and axes become one."""
    if len(runs) == 1:
        return {"verdict": [], **sections(runs[0].view)}
    blocks: dict[str, list[Block]] = {"verdict": []}
    charts: dict[str, list[Line]] = {}
    for place, run in enumerate(runs):
        for name, found in sections(run.view).items():
            section = blocks.setdefault(name, [])
            for block in found:
                if not isinstance(block, Chart):
                    section.append(replace(block, title=f"{run.name}: {block.title}"))
                    continue
                lines = [_of_run(line, run, place) for line in block.lines if line.shared]
                if lines and block.title not in charts:
                    charts[block.title] = []
                    section.append(replace(block, lines=charts[block.title]))
                if lines:
                    charts[block.title] += lines
    return blocks


def _of_run(line: Line, run: Run, place: int) -> Line:
    return replace(line, name=f"{run.name}: {line.name}", color=place, low=(), high=())


def configuration(runs: Runs) -> list[Block]:
    """All config values, for several runs those that differ first, and the versions."""
    heads = ["key", *(run.name for run in runs)]
    if len(runs) == 1:  # whose name stands above, and could be read as a word
        heads = ["key", "value"]
    config = _rows(list(map(_config, runs)))
    different = [row for row in config if len(set(row[1:])) > 1]
    tables: list[Block] = [
        Table("The whole configuration", heads, config),
        Table("Versions and hardware", heads, _rows([run.environment for run in runs])),
    ]
    if different:
        tables.insert(0, Table("Differences between the runs", heads, different))
    return tables


def _config(run: Run) -> dict[str, Any]:
    """Returns the config of a run; of a loop outside Esper only what its Grower uses of it."""
    if not run.view.own_loop:
        return run.config
    used: dict[str, Any] = {}
    for name in ("run", "env", "reward", "governor"):
        if name in run.config:
            used[name] = run.config[name]
    return used


def _rows(tables: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Returns a row for each dotted name: the name, and its value in each of the tables."""
    flat = list(map(_flat, tables))
    rows = []
    for name in dict.fromkeys(chain(*flat)):
        cells = [values.get(name, "") for values in flat]
        rows.append([name, *cells])
    return rows


def _flat(nested: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Flattens nested tables to dotted names; values are written as JSON, strings as they are."""
    flat: dict[str, str] = {}
    for key, value in nested.items():
        if isinstance(value, dict) and value and len(prefix) < 200:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            if not isinstance(value, str):
                value = json.dumps(value, default=str)
            flat[f"{prefix}{key}"] = value
    return flat


def comparison_html(folder: Path) -> str:
    """Returns the page about a comparison: its pictures and its tables. Raises ConfigError if it has no result yet."""
    images = []
    for name in ("pairs", "differences", "cost"):
        file = folder / f"{name}.svg"
        if file.is_file():
            images.append((name, file.read_bytes()))
    text = saved_tables(folder)
    return _page(folder.absolute().name, [f"{folder}: a comparison"], [], text=text, images=images)


def write_report(folders: Sequence[Path], file: Path | None = None) -> Path:
    """Writes the report about the runs, or the one comparison, in ``folders`` and returns its path.

    Without ``file``, it is report.html in the run's folder, or in the working directory for several runs.

    Raises:
        ConfigError: a folder holds no run, a comparison has no result or is one of several folders, or ``file`` cannot
            be written or is not an earlier report.
    """
    path = file
    if path is not None:
        check_file(path)
    if len(folders) == 1 and is_comparison(folders[0]):
        page = comparison_html(folders[0])
    else:
        page = report_html(open_runs(folders))
    if path is None:
        path = Path("report.html")
        if len(folders) == 1:
            path = folders[0] / path
        check_file(path)
    try:
        write_atomic(path, page.encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; give another --out") from None
    return path


def check_file(path: Path) -> None:
    """Raises ConfigError unless ``path`` is new in an existing folder, or an earlier report."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"--out {path}: give a file in an existing folder, such as {path / 'report.html'}")
    if not path.exists():
        return
    if not path.is_file():
        raise ConfigError(f"{path} is not a file that can be replaced, such as a pipe; give another --out")
    with path.open("rb") as file:
        head = file.read(200).decode("utf-8", "replace")
    if head and MARK not in head:
        raise ConfigError(f"{path} already exists and is not an Esper report; give another --out")


def score_of(views: Iterable[RunView]) -> ScoreUnit:
    """Returns the unit in which the score of all views is shown: percentage points if they have different ones."""
    scores = {view.score for view in views}
    if len(scores) == 1:
        return scores.pop()
    return ScoreUnit("score", "pp")


def units(views: Iterable[RunView]) -> str:
    """Returns a sentence about the units of scores."""
    score = score_of(views)
    if score == ACCURACY:
        return "Accuracies are percentages, differences percentage points (pp)."
    if score.priced:
        return "A return is an accuracy minus the price of what was grown, in percentage points (pp)."
    unit = score.unit or "its own unit"
    return f"{score.name} and its differences are in {unit}; rewards count {score.points:g} percentage points for 1."
