"""The documents are correct: their imports exist, their commands parse, and their files and links exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from esper.agents.make import make_controller
from esper.cli.main import group
from esper.config import TrainingConfig
from esper.config.files import set_dotted
from esper.data.task import resolve
from esper.data.tasks import load_task
from esper.run.experiment import Experiment
from esper.seeds.blueprints import BLUEPRINTS
from esper.spaces.action import ActionSpec
from esper.spaces.observation import ObservationLayout
from tests.tooling.imported_names import missing_imports

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [
        text
        for kind, text in BLOCK.findall(page.read_text(encoding="utf-8"))
        if kind == language
    ]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


README = ROOT / "README.md"
WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]
USING = ROOT / "docs" / "using.md"


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


COMMANDS = sorted(
    {
        line
        for page in PAGES
        for text in blocks(page, "sh")
        for command in text.splitlines()
        for line in command.split(" && ")
        if line.startswith("esper")
    }
)


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_of_the_pages_parse(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command = group.get_command(None, name)  # type: ignore[arg-type]
    assert command is not None, f"{name} is no command"
    parent = group.make_context(
        "esper", [], resilient_parsing=True
    )  # its settings are the command's, too
    context = command.make_context(
        name, arguments, parent=parent
    )  # raises for an option or a value that cannot be
    for assignment in context.params.get("assignments", ()):
        tables: dict[str, Any] = {}
        set_dotted(tables, assignment)
        TrainingConfig.parse(tables)


def test_every_command_is_in_the_pages() -> None:
    assert {line.split()[1] for line in COMMANDS} == set(group.list_commands(None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "toml")], ids=named
)
def test_the_toml_of_a_page_is_a_config_or_a_schedule(
    page: Path, tmp_path: Path
) -> None:
    task = load_task("digits")
    host = task.build_host()
    for text in blocks(page, "toml"):
        tables = tomllib.loads(text)
        if "action" not in tables:
            resolve(TrainingConfig.parse(tables), task)
            continue
        (tmp_path / "s.toml").write_text(text, encoding="utf-8")
        spec = ActionSpec(host.slot_names, BLUEPRINTS.names(host.topology))
        layout = ObservationLayout(
            host.slot_names, spec.blueprints, task.episode_length
        )
        make_controller(
            f"schedule:{tmp_path / 's.toml'}", task.name, spec, layout, 1, 0
        )


@pytest.mark.slow
def test_the_schedule_of_the_pages_makes_a_fossil(tmp_path: Path) -> None:
    (text,) = (text for text in blocks(USING, "toml") if "[[action]]" in text)
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
    for target, anchor in re.findall(
        r"\]\(([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")
    ):
        if target.startswith("https://"):
            continue
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Returns the anchors of the headings of a page, as GitHub and MkDocs make them of plain words."""
    text = re.sub(
        r"^```.*?^```",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_no_line_of_a_page_is_too_long(page: Path) -> None:
    """Tables excepted: a row is one line."""
    long = [
        line
        for line in page.read_text(encoding="utf-8").splitlines()
        if len(line) > 120 and line[:1] != "|"
    ]
    assert not long


def test_contributing_names_every_make_target_and_no_other() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (phony,) = re.findall(
        r"^\.PHONY: (.*)$",
        (ROOT / "Makefile").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert set(re.findall(r"^\| `make ([\w-]+)` \|", text, re.MULTILINE)) | {
        "all"
    } == set(phony.split())


def test_contributing_lays_out_what_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    layout = text[text.index("## Layout") : text.index("## Rules")]
    rows = re.findall(r"^\| (`[^|]*) \|", layout, re.MULTILINE)
    listed = {
        name.rstrip("/") for row in rows for name in re.findall(r"`([^`]*)`", row)
    }
    assert all((ROOT / name).exists() for name in listed), listed
    packages = {
        f"esper/{path.parent.name}" for path in (ROOT / "esper").glob("*/__init__.py")
    }
    assert packages == {
        name
        for name in listed
        if name.startswith("esper/") and not name.endswith(".py")
    }


def test_the_concepts_name_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Concepts")[2].partition("\n## ")[0]
    files = [ROOT / "esper" / name for name in re.findall(r"`([\w/]+\.py)`", section)]
    assert len(files) >= 20
    assert [path for path in files if not path.is_file()] == []


def test_the_changelog_has_this_version() -> None:
    from esper import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
