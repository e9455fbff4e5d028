"""The grammar of controllers: names, kinds with a path, functions in files, and callables."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

import esper
from esper.agents.controller import NoGrowth
from esper.agents.make import RULES
from esper.agents.spec import FORM, NAMES, ControllerSpec
from esper.config import ConfigError

PACKAGE = Path(esper.__file__).parent


def makes(env: object) -> None:
    """A controller of a user's."""


@pytest.mark.parametrize(
    ("name", "kind", "path", "function"),
    [
        ("heuristic", "heuristic", "", ""),
        ("schedule:a:b.toml", "schedule", "a:b.toml", ""),
        ("checkpoint:mine.py", "checkpoint", "mine.py", ""),
        ("a/mine.py:make", FORM, "a/mine.py", "make"),
        ("mine.py", FORM, "mine.py", ""),
        ("callable:make", "callable", "make", ""),
        ("sampled:", "sampled:", "", ""),
        ("", "", "", ""),
    ],
)
def test_a_name_is_split_into_its_parts(
    name: str, kind: str, path: str, function: str
) -> None:
    assert ControllerSpec.of(name) == ControllerSpec(name, kind, path, function)


def test_a_callable_is_recorded_by_a_name_that_leads_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    spec = ControllerSpec.of(makes)
    assert (spec.name, spec.kind, spec.make) == ("test_spec.py:makes", FORM, makes)
    monkeypatch.chdir(Path(__file__).parents[2] / "docs")
    assert ControllerSpec.of(makes).name == f"{Path(__file__)}:makes"
    names = [ControllerSpec.of(make).name for make in (lambda env: env, partial(makes))]
    assert names == [
        "callable:test_a_callable_is_recorded_by_a_name_that_leads_to_it.<locals>.<lambda>",
        "callable:makes",
    ]
    with pytest.raises(
        ConfigError,
        match="controller is a int; expected a name, or a function that makes",
    ):
        ControllerSpec.of(3)  # type: ignore[arg-type]


def test_every_form_is_known_and_nothing_else() -> None:
    for name in NAMES:
        assert ControllerSpec.of(name).known
    for name in (
        "checkpoint",
        "checkpoint:",
        "plans",
        "random:x",
        "none:x",
        "callable:x",
        "Random",
        "path",
        "",
    ):
        with pytest.raises(
            ConfigError,
            match=f"unknown controller '{name}'.*; known: ppo, checkpoint:PATH, pret",
        ):
            ControllerSpec.of(name).check()
    with pytest.raises(ConfigError, match=r"'heurist' \(did you mean 'heuristic'\?\)"):
        ControllerSpec.of("heurist").check()
    with pytest.raises(
        ConfigError, match="ppo must be trained before it can be compared"
    ):
        ControllerSpec.of("ppo").check()
    assert ControllerSpec.of(lambda env: env).check().kind == "callable"


def test_every_rule_has_a_name() -> None:
    assert set(RULES) <= set(NAMES)
    assert RULES["none"] is NoGrowth


def test_what_a_controller_does_is_said_by_its_name() -> None:
    names = NAMES

    def having(fact: str) -> list[str]:
        return [name for name in names if getattr(ControllerSpec.of(name), fact)]

    assert having("learns") == ["ppo"]
    assert having("is_trained") == [
        "ppo",
        "checkpoint:PATH",
        "pretrained",
        "sampled:PATH",
    ]
    followers = [
        "checkpoint:PATH",
        "pretrained",
        "sampled:PATH",
        "schedule",
        "schedule:FILE.toml",
    ]
    assert having("follows") == followers
    assert having("alone") == ["none"]
    assert having("is_code") == [FORM]


def test_models_of_stable_baselines_are_refused_with_what_to_use_instead() -> None:
    for name in ("checkpoint:model.zip", "sampled:runs/model.zip"):
        with pytest.raises(ConfigError, match=r"as in examples/sb3_controller\.py"):
            ControllerSpec.of(name).check()


def test_folders_have_short_names_of_controllers() -> None:
    names = ("ppo", "schedule:a/slow.toml", "a/mine.py:make")
    assert [ControllerSpec.of(name).short for name in names] == [
        "ppo",
        "slow",
        "mine",
    ]


def test_a_controller_is_the_same_if_its_file_has_moved() -> None:
    def same(one: str, other: str) -> bool:
        return ControllerSpec.of(one).same_as(ControllerSpec.of(other))

    assert same("heuristic", "heuristic")
    assert same("a.py:f", "b/c.py:f")
    assert not same("a.py:f", "a.py:g")
    assert not same("a.py:f", "f")


def test_a_copy_takes_the_place_of_what_is_followed() -> None:
    copy = Path("runs/a")
    names = ("ppo", "pretrained", "checkpoint:b", "sampled:b", "schedule")
    copies = [ControllerSpec.of(name).following(copy) for name in names]
    assert copies == [
        *["checkpoint:runs/a"] * 3,
        "sampled:runs/a",
        "schedule:runs/a",
    ]


SPLITS = re.compile(r"(?:partition|split|removeprefix|startswith)\(\(?\"[\w-]*:\"")
OF_OTHERS = {
    "agents/spec.py": "the grammar",
    "cli/launch.py": "a path in an argument",
    "compare/arms.py": "NAME:SECTION.KEY=VALUE, around the name of a controller",
    "files/system_info.py": "/proc/cpuinfo",
    "telemetry/memory.py": "/proc/self/status",
    "training/execution/cores.py": "/proc/self/cgroup",
}
"""Modules that split a text at a colon, and the text."""


def test_only_its_grammar_splits_the_name_of_a_controller() -> None:
    modules = [
        file.relative_to(PACKAGE).as_posix()
        for file in sorted(PACKAGE.rglob("*.py"))
        if SPLITS.search(file.read_text(encoding="utf-8"))
    ]
    assert modules == list(OF_OTHERS)
