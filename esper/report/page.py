"""The report: one self-contained HTML file without scripts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from string import Template

from esper.config import ConfigError
from esper.files.atomic import write_atomic
from esper.report.accuracy import accuracy_section
from esper.report.cost import time_section
from esper.report.growth import contributions_section, lives_section
from esper.report.html import escape
from esper.report.learning import policy_section, reward_section
from esper.report.overview import configuration_section, events_section, summary_section
from esper.report.read import Run, open_runs

MARK = "<!-- a report of Esper -->"
"""Begins every report; only files with it may be replaced."""
STYLE = """\
html{color-scheme:light dark;font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;
--page:#f6f7f9;--card:#fff;--ink:#15191f;--quiet:#55606e;--rule:#dde1e7;--link:#0b63c5;-webkit-text-size-adjust:100%}
@media (prefers-color-scheme:dark){
html{--page:#0f1216;--card:#181c22;--ink:#e9edf2;--quiet:#a3aebb;--rule:#303741;--link:#6cb2ff}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);overflow-wrap:anywhere}
header,main,footer{max-width:1280px;margin:0 auto;padding:0 16px}
header{padding-top:20px}
footer{padding-top:24px;padding-bottom:40px}
h1{font-size:1.6rem;line-height:1.2;margin:0 0 4px}
h2{font-size:1.25rem;margin:36px 0 10px;padding-top:10px;border-top:1px solid var(--rule)}
h3{font-size:1rem;margin:0}
section>h3{margin:24px 0 8px}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;margin:12px 0 0}
a{color:var(--link)}
p{margin:4px 0}
.note,figcaption p,footer{color:var(--quiet);font-size:.9rem}
.figures{display:grid;gap:16px;grid-template-columns:repeat(auto-fill,minmax(min(100%,440px),1fr));margin:12px 0;
align-items:start}
figure{margin:0;padding:12px;background:var(--card);border:1px solid var(--rule);border-radius:8px;min-width:0}
svg{display:block;width:100%;height:auto;margin:8px 0;background:#fff;border-radius:6px}
svg *{stroke-linejoin:round;stroke-linecap:butt}
svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif!important}
.round{margin:8px 0 16px}
.round svg{min-width:720px}
.round>summary{font-weight:600}
.scroll{overflow:auto;margin:8px 0}
div.scroll{max-height:70vh}
table{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:4px 0}
th,td{padding:4px 12px 4px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule);
overflow-wrap:normal;max-width:28rem}
td{min-width:3.5rem}
th[scope=row]{font-weight:400}
thead th{position:sticky;top:0;background:var(--page);font-weight:600}
figure thead th{background:var(--card)}
td.n{text-align:right}
.facts td{text-align:left;overflow-wrap:anywhere}
summary{cursor:pointer;font-size:.9rem;padding:4px 0}
.problems{border-left:4px solid #d55e00;background:var(--card);padding:8px 12px;margin:8px 0}
.problems ul{margin:4px 0;padding-left:20px}
:focus-visible{outline:2px solid var(--link);outline-offset:2px}
@media print{details>*{display:block}.scroll{max-height:none}}
"""
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
LINKS = {
    "summary": "Summary",
    "accuracy": "Accuracy",
    "slots": "Slots",
    "contributions": "Contributions",
    "reward": "Reward",
    "policy": "Agent",
    "time": "Time",
    "events": "Events",
    "configuration": "Configuration",
}


def report_html(runs: Sequence[Run]) -> str:
    """Returns the page about one run, or several side by side."""
    content = [
        summary_section(runs),
        accuracy_section(runs),
        lives_section(runs),
        contributions_section(runs),
        reward_section(runs),
        policy_section(runs),
        time_section(runs),
        events_section(runs),
        configuration_section(runs),
    ]
    when = time.strftime("%Y-%m-%d %H:%M")
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    return PAGE.substitute(
        title=escape(f"Esper: {title}"),
        style=STYLE,
        about=escape("; ".join(f"{run.folder}: {run.state_words()}" for run in runs), 2000),
        links="".join(f'<a href="#{name}">{words}</a>' for name, words in LINKS.items()),
        content="".join(content),
        footer=escape(f"Made {when}. Accuracies are percentages, differences percentage points (pp)."),
    )


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
