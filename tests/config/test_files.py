"""Configs as text: TOML files, values from the command line, and names that are misspelt."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from esper.config.files import read_toml, set_dotted, toml_text
from esper.errors import ConfigError


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("a.b=3", 3),
        ("a.b = 0.5", 0.5),
        ("a.b=true", True),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b=two words", "two words"),
    ],
)
def test_an_assigned_value_is_toml_or_a_string(assignment: str, value: Any) -> None:
    tables: dict[str, Any] = {"a": {"c": 1}}
    set_dotted(tables, assignment)
    assert tables == {"a": {"c": 1, "b": value}}


def test_an_assignment_makes_the_sections_on_its_way() -> None:
    tables: dict[str, Any] = {}
    set_dotted(tables, "a.b.c=x=y")
    assert tables == {"a": {"b": {"c": "x=y"}}}


@pytest.mark.parametrize("assignment", ["a.b", "a=1", ".b=1", "a.=1", "a..b=1"])
def test_an_assignment_of_another_form_is_refused(assignment: str) -> None:
    with pytest.raises(ConfigError, match=r"--set needs SECTION\.NAME=VALUE"):
        set_dotted({}, assignment)


def test_an_assignment_through_a_value_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--set a\.b\.c=1: b is a value, not a section"
    ):
        set_dotted({"a": {"b": 2}}, "a.b.c=1")


def test_written_tables_are_read_back_from_a_file(tmp_path: Path) -> None:
    tables = {
        "top": 1,
        "a": {
            "text": 'quotes " and \\',
            "control": "\x7f\t",
            "b": {"many": [1.5, -2.0], "no": False},
        },
    }
    (tmp_path / "c.toml").write_text(toml_text(tables), encoding="utf-8")
    assert read_toml(tmp_path / "c.toml") == tables
    assert tomllib.loads(toml_text({})) == {}


@pytest.mark.parametrize("content", [b"a = [", b"a = \xff", b"a = " + 1_000_000 * b"["])
def test_a_file_that_is_not_toml_is_named_by_its_kind(
    content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "c.toml").write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"^schedule .*c\.toml cannot be read as TOML: "
    ):
        read_toml(tmp_path / "c.toml", "schedule")
    with pytest.raises(ConfigError, match=r"^config file .*gone\.toml does not exist$"):
        read_toml(tmp_path / "gone.toml")


@pytest.mark.parametrize(
    "text", ["3\nseed = 4", '3\n[task]\nname = "chars"', "3\n[run]", "3\nvalue.x = 1"]
)
def test_a_value_of_several_lines_sets_nothing_else(text: str) -> None:
    tables: dict[str, Any] = {}
    set_dotted(tables, f"run.seed={text}")
    assert tables == {"run": {"seed": text}}


def test_a_list_may_have_several_lines() -> None:
    tables: dict[str, Any] = {}
    set_dotted(tables, "env.slots=[\n 'r0',\n 'r1',\n]")
    assert tables == {"env": {"slots": ["r0", "r1"]}}
