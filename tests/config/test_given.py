"""Paths as a shell hands them over."""

from __future__ import annotations

import importlib
from pathlib import Path

import click
import pytest

from esper.agents.spec import ControllerSpec
from esper.bench.command import command as bench
from esper.cli.group import COMMANDS, PLACES
from esper.compare.arms import read_arms
from esper.config import ConfigError
from esper.config.given import PATH, GivenPath
from esper.files.policy import policy_path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def all_commands() -> list[click.Command]:
    found: list[click.Command] = [bench]
    for name in COMMANDS:
        module, _, attribute = PLACES.get(name, f"{name}.command").partition(".")
        module = importlib.import_module(f"esper.cli.{module}")
        found.append(getattr(module, attribute))
    return found


def test_a_tilde_is_the_home_folder_and_only_in_front(home: Path) -> None:
    for given, expected in {
        "~": home,
        "~/x": home / "x",
        "~/a b/[c]": home / "a b" / "[c]",
        "./~/x": Path("~/x"),
        "a~b": Path("a~b"),
        "-x": Path("-x"),
    }.items():
        assert PATH.convert(given, None, None) == expected


@pytest.mark.parametrize("given", ["", "~nobody-has-this-name/x"])
def test_paths_that_are_none_are_refused(given: str) -> None:
    with pytest.raises(click.BadParameter, match=r"empty; the current|no such user"):
        PATH.convert(given, None, None)


def test_every_path_of_every_command_has_this_type() -> None:
    paths = 0
    for command in all_commands():
        for parameter in command.params:
            if isinstance(parameter.type, click.Path | click.File):
                assert isinstance(parameter.type, GivenPath), (command, parameter)
                paths += 1
    assert paths > 10


def test_a_tilde_behind_a_colon_or_an_equals_sign_is_the_home_folder(
    home: Path,
) -> None:
    for kind in ("schedule", "checkpoint", "sampled"):
        assert ControllerSpec.of(f"{kind}:~/x").path == str(home / "x")
    assert ControllerSpec.of("~/x.py:f").path == str(home / "x.py")
    assert policy_path("checkpoint:~/x") == policy_path("~/x") == home / "x"
    with pytest.raises(ConfigError, match=f"{home}/arm.toml"):
        read_arms(("none", "mine=~/arm.toml"), {})
