"""Write what the check showed: a page, the same as JSON, and one small archive with all logs."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.runner import ROOT, Result

MAX_FILE = (
    2**20
)  # bytes of one file in the archive; of a longer one, the beginning and the end
MAX_ARCHIVE = 15 * 2**20  # bytes of all files, before compression
TAIL = 12  # lines of the log of a failed step that the page shows
KINDS = (
    ".md",
    ".json",
    ".xml",
    ".txt",
    ".log",
    ".jsonl",
    ".csv",
    ".toml",
)  # most telling first


def write(results: list[Result], folder: Path, archive: Path) -> None:
    """Write `summary.md`, `summary.json` and the archive, so that they are whole at any time."""
    measured = []
    for file in sorted(folder.glob("bench-*.json")):
        measured += _json(file)
    facts = {
        "machine": _json(folder / "machine.json"),
        "steps": [asdict(result) for result in results],
        "measured": measured,
    }
    (folder / "summary.json").write_text(json.dumps(facts, indent=2) + "\n")
    (folder / "summary.md").write_text(page(results, folder))
    part = archive.with_name(archive.name + ".part")
    with tarfile.open(part, "w:gz") as tar:
        for name, content in contents(folder):
            member = tarfile.TarInfo(f"gpu_check/{name}")
            member.size = len(content)
            member.mtime = int(datetime.now(UTC).timestamp())
            tar.addfile(member, io.BytesIO(content))
    os.replace(part, archive)


def contents(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files for the archive, shortened, and no more of them than it may hold."""
    files = [
        file for file in folder.rglob("*") if file.is_file() and file.suffix in KINDS
    ]
    room, left_out = MAX_ARCHIVE, []
    for file in sorted(files, key=lambda file: (KINDS.index(file.suffix), file)):
        name, content = file.relative_to(folder).as_posix(), _shortened(file)
        if len(content) <= room:
            room -= len(content)
            yield name, content
        else:
            left_out.append(name)
    if left_out:
        yield "left_out.txt", "\n".join(left_out).encode()


def page(results: list[Result], folder: Path) -> str:
    """The summary as Markdown: the machine, the steps, the measurements, and the ends of the logs of failed steps."""
    statuses = [result.status for result in results]
    known = ("ok", "failed", "skipped")
    counts = [f"{statuses.count(status)} {status}" for status in known]
    lines = [
        "# Check on a GPU",
        "",
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, after {_seconds(results)} s",
        "",
        "```",
    ]
    lines += [*_json(folder / "machine.json"), "```", ""]
    lines += [f"## Steps: {', '.join(counts)}", ""]
    lines += ["| step | status | seconds | |", "| --- | --- | --- | --- |"]
    for r in results:
        lines.append(f"| {r.step} | {r.status} | {r.seconds:.1f} | {_cell(r.says)} |")
    head: list[str] = []
    rows = []
    for file in sorted(folder.glob("bench-*.md")):
        table = _table(file)
        head = head or table[:2]
        rows += table[2:]
    if rows:
        lines += ["", "## Measurements", "", *head, *rows]
    for result in results:
        if result.status == "failed" and (end := tail(folder / f"{result.step}.log")):
            lines += ["", f"## End of the log of {result.step}", "", "```", *end, "```"]
    return clean("\n".join(lines)) + "\n"


def tail(log: Path) -> list[str]:
    """Last lines of a log, cut to 200 characters; none if the log is one line, which a step's result says anyway."""
    lines = (
        log.read_text(errors="replace").rstrip().splitlines() if log.is_file() else []
    )
    return [line[:200] for line in lines[-TAIL:]] if len(lines) > 1 else []


def clean(text: str) -> str:
    """Text without the machine's own paths."""
    for path, name in ((ROOT, "."), (Path(sys.prefix), "PYTHON"), (Path.home(), "~")):
        if path != Path("/"):
            text = text.replace(str(path), name)
    return text


def _seconds(results: list[Result]) -> int:
    return round(sum(result.seconds for result in results))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _table(file: Path) -> list[str]:
    """Rows of the table on a page of esper-bench, the two of its head first."""
    return [line for line in file.read_text().splitlines() if line.startswith("|")] or [
        "",
        "",
    ]


def _json(file: Path) -> list:
    """A JSON list, empty if a step ended before it wrote the whole of it."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return []


def _shortened(file: Path) -> bytes:
    """The content of a file, or the first quarter and the last three of what may be kept."""
    size = file.stat().st_size
    if size <= MAX_FILE:
        return file.read_bytes()
    with open(file, "rb") as stream:
        first = stream.read(MAX_FILE // 4)
        stream.seek(size - MAX_FILE // 4 * 3)
        return first + b"\n\n[... cut ...]\n\n" + stream.read()
