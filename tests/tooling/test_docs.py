"""The pages are correct: imports exist, commands parse, and files and links exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest

from build_support.docs_hooks import command_reference
from esper.agents.make import make_controller
from esper.cli.group import group
from esper.config import TrainingConfig
from esper.config.files import set_dotted
from esper.core.action import ActionSpec
from esper.core.blueprints import BLUEPRINTS
from esper.core.observation import ObservationLayout
from esper.data.task import resolve
from esper.data.tasks import load_task
from esper.run.experiment import Experiment
from tests.tooling.imported_names import missing_imports

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAX_PAGES, MAX_WORDS = 20, 20_500


def blocks(page: Path, language: str) -> list[str]:
    """Code of the fenced blocks of a language."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [text for kind, text in found if kind == language]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


README = ROOT / "README.md"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
WITH_TOML = [page for page in PAGES if blocks(page, "toml")]
CLI = ROOT / "docs" / "cli.md"


def test_pages_are_few_and_short() -> None:
    assert len(list((ROOT / "docs").glob("*.md"))) <= MAX_PAGES
    assert sum(len(page.read_text().split()) for page in PAGES) <= MAX_WORDS


def test_the_two_commands_come_first_and_alone() -> None:
    kind, text = BLOCK.findall(README.read_text(encoding="utf-8"))[0]
    assert kind == "sh"
    assert text.splitlines() == [
        "pip install torch==2.13.0 -e . && esper run",
        'pip install torch==2.13.0 -e ".[test]" && pytest',
    ]


@pytest.mark.parametrize(("ending", "place"), [("esper run", 0), ("pytest", 1)])
def test_ci_finds_the_two_commands(ending: str, place: int) -> None:
    """The function is that of .ci/run."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    function = re.search(r"^readme_command\(\).*?^}$", script, re.MULTILINE | re.DOTALL)
    assert function
    found = subprocess.run(
        ["bash", "-c", f"{function[0]}\nreadme_command '{ending}'"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == [blocks(README, "sh")[0].splitlines()[place]]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=named)
def test_imports_of_a_page_exist(page: Path) -> None:
    assert missing_imports("\n".join(blocks(page, "python"))) == []


def test_an_import_of_what_does_not_exist_is_named() -> None:
    code = "import esper.nowhere, os.nothing\nfrom esper.config import Nothing, TrainingConfig\nfrom esper import grower"
    assert missing_imports(code) == ["esper.nowhere", "esper.config.Nothing"]


def commands() -> set[str]:
    """Commands of Esper in the pages."""
    found: set[str] = set()
    for page in PAGES:
        for text in blocks(page, "sh"):
            for line in text.splitlines():
                found.update(line.split(" && "))
    return {line for line in found if line.startswith("esper ")}


@pytest.mark.parametrize("line", sorted(commands()))
def test_the_commands_of_the_pages_parse(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    parent = group.make_context("esper", [], resilient_parsing=True)
    command = group.get_command(parent, name)
    assert command is not None, f"{name} is no command"
    context = command.make_context(name, arguments, parent=parent)
    for assignment in context.params.get("assignments", ()):
        tables: dict[str, Any] = {}
        set_dotted(tables, assignment)
        TrainingConfig.parse(tables)


def test_every_command_is_in_the_pages() -> None:
    names = set(group.list_commands(click.Context(group)))
    assert {line.split()[1] for line in commands()} == names


def test_the_command_reference_has_every_option() -> None:
    text = command_reference()
    parent = click.Context(group)
    for name in group.list_commands(parent):
        command = group.get_command(parent, name)
        assert command is not None
        section = text.partition(f"### esper {name}\n")[2].partition("\n### ")[0]
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.opts[0] in section


@pytest.mark.parametrize("page", WITH_TOML, ids=named)
def test_the_toml_of_a_page_is_a_config_or_a_schedule(
    page: Path, tmp_path: Path
) -> None:
    task = load_task("digits")
    host = task.build_host()
    spec = ActionSpec(host.slot_names, BLUEPRINTS.names(host.topology))
    layout = ObservationLayout(host.slot_names, spec.blueprints, task.episode_length)
    for text in blocks(page, "toml"):
        tables = tomllib.loads(text)
        if "action" in tables:
            file = tmp_path / "s.toml"
            file.write_text(text, encoding="utf-8")
            make_controller(f"schedule:{file}", task.name, spec, layout, 1, 0)
        else:
            resolve(TrainingConfig.parse(tables), task)


@pytest.mark.slow
def test_the_schedule_of_the_pages_makes_a_fossil(tmp_path: Path) -> None:
    (text,) = (text for text in blocks(CLI, "toml") if "[[action]]" in text)
    (tmp_path / "s.toml").write_text(text, encoding="utf-8")
    config = TrainingConfig.parse(
        {
            "run": {"rounds": 1, "controller": f"schedule:{tmp_path / 's.toml'}"},
            "env": {"n_envs": 3, "episode_length": 12, "baseline_episodes": 1},
        }
    )
    assert Experiment(config, tmp_path / "run").run().fossils > 0


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if target.startswith("https://"):
            continue
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub and MkDocs make them of plain words."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(words.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_no_line_of_a_page_is_too_long(page: Path) -> None:
    """Tables excepted: a row is one line."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if len(line) > 120 and line[0] != "|"] == []


def test_contributing_names_every_make_target_and_no_other() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    named = re.findall(r"^\| `make ([\w-]+)` \|", CONTRIBUTING, re.MULTILINE)
    assert {*named, "all"} == set(phony.split())


def test_contributing_lays_out_what_is_there() -> None:
    layout = CONTRIBUTING[
        CONTRIBUTING.index("## Layout") : CONTRIBUTING.index("## Rul")
    ]
    folders = set(re.findall(r"`esper/([\w]+)/`", layout))
    assert folders == {path.parent.name for path in ROOT.glob("esper/*/__init__.py")}
    files = re.findall(r"`([\w/]+/\w+\.py)`", CONTRIBUTING.replace("esper/a/b.py", ""))
    known = [name for name in files if "NAME" not in name and "test_op" not in name]
    assert len(known) >= 30
    missing = [name for name in known if not exists(name)]
    assert [name for name in missing if "/op" not in name and "/a/" not in name] == []


def exists(name: str) -> bool:
    """Whether there is such a file, also below ``esper/``."""
    return (ROOT / name).is_file() or (ROOT / "esper" / name).is_file()


def test_the_changelog_has_this_version() -> None:
    from esper import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
