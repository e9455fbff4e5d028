"""Recorded results say how they were made: by commands of this repository that exist."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from esper.bench.command import command as bench
from esper.cli.group import group
from esper.compare import controls
from esper.config import TrainingConfig
from esper.config.files import set_dotted

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted(path for path in RESULTS.iterdir() if path.suffix in (".md", ".txt"))
recorded = runpy.run_path(str(ROOT / "benchmarks" / "record_results.py"))["commands"]
PROGRAMS = ("esper", "esper-bench", "python", "pytest", "make")


def commands(page: Path) -> list[list[str]]:
    """The commands of a page as lists of words: indented, after ``$``, or in code spans. N stands for a number."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^(?: {4}|\$ )(.+)$", text, re.MULTILINE) + re.findall(
        r"`([^`\n]+ [^`\n]+)`", text
    )
    found = []
    for line in lines:
        if any(re.match(rf"(\w+=\S+ )*{program} ", line) for program in PROGRAMS):
            words = shlex.split(re.sub(r"\bN\b", "3", line), comments=True)
            found.append([word for word in words if not re.match(r"[A-Z_]+=", word)])
    return found


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails unless the command exists and takes these options."""
    match words:
        case ["esper", name, *arguments]:
            command: Any = group.get_command(None, name)  # type: ignore[arg-type]
            assert command is not None, f"{name} is no command"
            parent = group.make_context("esper", [], resilient_parsing=True)
            context = command.make_context(name, arguments, parent=parent)
            for assignment in context.params.get("assignments", ()):
                tables: dict[str, Any] = {}
                set_dotted(tables, assignment)
                TrainingConfig.parse(tables)
        case ["esper-bench", *arguments]:
            bench.make_context("esper-bench", list(arguments))
        case ["python", "-m", module, *arguments]:
            check_script(
                ROOT / f"{module.replace('.', '/')}.py",
                [str(ROOT)],
                arguments,
                monkeypatch,
            )
        case ["python", script, *arguments]:
            check_script(
                ROOT / script, [str((ROOT / script).parent)], arguments, monkeypatch
            )
        case ["pytest", *arguments]:
            paths = [argument for argument in arguments if "/" in argument]
            assert paths
            assert all((ROOT / path.partition("::")[0]).exists() for path in paths)
        case ["make", target, *_]:
            assert re.search(
                rf"^{target}:",
                (ROOT / "Makefile").read_text(encoding="utf-8"),
                re.MULTILINE,
            )
        case _:
            pytest.fail(f"{shlex.join(words)} is not a command of this repository")


class Parsed(Exception):
    """The options of a script were accepted."""


def check_script(
    script: Path, path: list[str], arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs a script until its options are read; ``path`` is what Python finds modules in, beside what is installed."""
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *rest: Any) -> None:
        parse(self, *rest)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [script.name, *arguments])
    installed = [
        entry
        for entry in sys.path
        if entry and Path(entry) not in (ROOT, *ROOT.iterdir())
    ]
    monkeypatch.setattr(sys, "path", [*path, *installed])
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "benchmarks"
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(controls, "CONTROLS", {})  # modules register theirs again
    with pytest.raises(Parsed):
        runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_of_results_names_the_commands_that_give_them(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = commands(page)
    assert found
    for words in found:
        check(words, monkeypatch)


def test_folders_that_a_command_reads_are_made_by_another_one() -> None:
    """By commands that `record_results.py` runs: those on a line of their own."""
    lines = [line for page in PAGES for line in recorded(page)]
    made = {
        name for line in lines for name in re.findall(r"--out (runs/[\w./-]+)", line)
    }
    read = {
        name
        for line in lines
        for name in re.findall(r"(?<!--out )\b(runs/[\w./-]+)(?![\w./*\[-])", line)
    }
    assert {
        name
        for name in read
        if not any(name == one or name.startswith(f"{one}/") for one in made)
    } == set()


@pytest.mark.parametrize(
    "line",
    [
        "esper run --no-such-option 1",
        "esper-bench no-such-case",
        "python benchmarks/snapshot_cost.py --no-such-option",
        "pytest tests/no_such_test.py",
    ],
)
def test_a_command_that_does_not_exist_is_noticed(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((Exception, SystemExit)):
        check(shlex.split(line), monkeypatch)


def test_every_recorded_file_belongs_to_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    others = [path for path in RESULTS.iterdir() if path not in PAGES]
    assert [
        path.name for path in others if f"{path.stem}.md" not in [p.name for p in PAGES]
    ] == []
    assert [
        path.name for path in others if path.name not in pages and path.suffix == ".png"
    ] == []
