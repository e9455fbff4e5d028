"""Metadata of the package, and its requirements, which are those of the imports."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads(
    (ROOT / "pyproject.toml").read_text(encoding="utf-8")
)["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
BY_NAME = {"tensorboard", "wandb", "trackio", "torchvision", "scikit-learn"}
"""Imported by a name in a table or by torch, or a file of theirs is read."""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}


def imported(folder: str) -> set[str]:
    """Top-level packages that the files of a folder import anywhere."""
    found: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found


def test_the_version_is_written_once() -> None:
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]


def test_every_requirement_has_a_lower_and_an_upper_bound() -> None:
    assert [
        name for name in PROJECT["dependencies"] if not re.search(r">=[\d.]+,<\d", name)
    ] == []


@pytest.mark.parametrize("extra", [None, "tensorboard", "track", "vision", "mnist"])
def test_required_packages_are_imported(extra: str | None) -> None:
    required = names(PROJECT["dependencies"] if extra is None else EXTRAS[extra])
    found = imported("esper")
    assert {name for name in required - BY_NAME if name not in found} == set()


def test_all_has_every_extra_of_users_that_needs_no_exact_torch() -> None:
    (everything,) = EXTRAS["all"]
    others = set(EXTRAS) - {"all", "vision", "integrations", "test", "dev", "docs"}
    assert set(everything.partition("[")[2].rstrip("]").split(",")) == others


def test_advice_to_install_names_this_package_and_an_extra_that_exists() -> None:
    files = [
        *ROOT.glob("esper/**/*.py"),
        *ROOT.glob("examples/*.py"),
        *ROOT.glob("docs/*.md"),
        ROOT / "README.md",
    ]
    advice = [
        match
        for path in files
        for match in re.findall(r"\b(esper[\w-]*)\[(\w+)\]", path.read_text("utf-8"))
    ]
    wanted = [(name, extra) for name, extra in advice if extra in EXTRAS]
    assert wanted
    assert {name for name, _ in wanted} == {PROJECT["name"]}
