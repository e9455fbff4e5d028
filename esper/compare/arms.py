"""Arms of a comparison: parsing their names, the config of each, and checks that they can be compared."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.agents.needs import with_needs
from esper.agents.spec import ALONE, FORM, NAMES, SAVED, ControllerSpec
from esper.config import ConfigError, TrainingConfig, did_you_mean, read_toml, set_dotted
from esper.data.user_code import is_user_task, refuse_untrusted

Tables = dict[str, Any]
"""A config as nested tables, as in a TOML file."""

CONTROL_NAMES = ["static", "bigger", "same-compute"]
"""Arms that are made from the results of another arm; :func:`esper.compare.controls.register` adds more."""


def forms() -> str:
    """Returns all forms of arms, as text."""
    built_in = (
        ALONE,
        *CONTROL_NAMES,
        "random",
        "heuristic",
        "plateau",
        "need",
        "schedule",
        "ppo",
        "pretrained",
        "ppo:RUN_FOLDER",
    )
    return (
        f"{', '.join(built_in)}; schedule:FILE.toml; {FORM}; NAME=FILE.toml; CONTROLLER:SECTION.KEY=VALUE,...; or "
        f"NAME:controller=CONTROLLER,SECTION.KEY=VALUE,..."
    )


SHARED: Mapping[tuple[str, str], str] = {
    ("task", "name"): "all arms train the same hosts on the same data",
    ("task", "data"): "all arms use the same data",
    ("run", "seed"): "it determines the initial weights and the batches of each pair",
    ("env", "n_envs"): "it determines which hosts form a pair",
    ("run", "device"): "devices round differently, which could look like a difference between arms",
}
"""Values that must be the same in all arms, and why."""

NEVER_READ: Mapping[str, str] = {
    "run.evaluation_pairs": "--pairs sets the number of hosts",
}
"""Values that an arm must not set, and why; in a file, which may be a run's config, they are ignored."""
READ_ONLY_WHILE_LEARNING: Mapping[str, str] = {
    "run.rounds": "--pairs sets the number of hosts",
    "run.checkpoint_every": "every finished round is saved",
    "ppo": "this arm does not learn during the comparison; one whose controller learns is ppo",
}
"""The same for arms that do not learn: keys, or a whole section."""


@dataclass(frozen=True)
class Arm:
    """One arm, validated as far as possible without its task."""

    name: str
    controller: str
    """A controller, or a key of CONTROL_NAMES."""
    config: TrainingConfig
    control_of: str | None = None
    """The arm whose hosts a control is made for."""

    @property
    def spec(self) -> ControllerSpec:
        """The controller, parsed."""
        return ControllerSpec.of(self.controller)

    @property
    def alone(self) -> bool:
        """Whether it leaves hosts alone."""
        return self.spec.alone

    @property
    def learns(self) -> bool:
        """Whether it is an agent that is trained by the comparison."""
        return self.config.run.learns

    def plain(self) -> dict[str, Any]:
        """Returns all but the name, ready for JSON."""
        return {
            "controller": self.controller,
            "of": self.control_of,
            "config": self.config.model_dump(mode="json"),
        }


@dataclass
class _Draft:
    """An arm as it is written, without the values that it shares or inherits."""

    name: str
    tables: Tables
    control_of: str | None = None
    controller: str = ""

    @property
    def spec(self) -> ControllerSpec:
        return ControllerSpec.of(self.controller)


def read_arms(texts: Sequence[str], base: Tables, control_of: str | None = None) -> list[Arm]:
    """Returns the arms named by ``texts``, in order; the config of each is ``base`` with its own values on top.

    A control inherits the values of the arm that it is made for: the one that it names (``of=NAME``), else
    ``control_of``, else the first arm that grows hosts.

    Raises:
        ConfigError: two arms have the same name, a text or config is invalid, arms differ in values that they must
            share, or a control has no arm that grows hosts.
    """
    read = [_read(text, base) for text in texts]
    drafts = {draft.name: draft for draft in read}
    if len(drafts) < len(read):
        raise ConfigError(f"two arms have the same name: {', '.join(draft.name for draft in read)}")
    common = _common(drafts, base)
    growing = [name for name, draft in drafts.items() if not (draft.spec.alone or draft.controller in CONTROL_NAMES)]
    if control_of is not None and not any(draft.controller in CONTROL_NAMES for draft in read):
        raise ConfigError(f"--of {control_of} is for controls, and no arm is one of {', '.join(CONTROL_NAMES)}")
    arms = []
    for name, draft in drafts.items():
        grown = None
        inherited: Tables = {}
        if draft.controller in CONTROL_NAMES:
            grown = _controlled(draft, control_of, growing)
            inherited = drafts[grown].tables
        tables = merged(base, inherited, draft.tables, common)
        run = tables.setdefault("run", {})
        if isinstance(run, dict):  # parse() refuses anything else
            run["controller"] = draft.controller
        try:
            config = with_needs(draft.controller, TrainingConfig.parse(tables))
        except ConfigError as error:
            raise ConfigError(f"arm {name!r}: {error}") from None
        arms.append(Arm(name, draft.controller, config, grown))
    return arms


def merged(*layers: Mapping[str, Any]) -> Tables:
    """Returns a copy of nested tables merged into one; later layers take precedence."""
    result: Tables = {}
    for tables in layers:
        for key, value in tables.items():
            if isinstance(value, dict) and isinstance(result.get(key), dict):
                result[key] = merged(result[key], value)
            else:
                result[key] = copy.deepcopy(value)
    return result


def _read(text: str, base: Tables) -> _Draft:
    """Parses one ``--arm``; a controller that it does not name is that of ``base``."""
    name, colon, rest = text.partition(":")
    file = re.fullmatch(r"([^:=]+)=(.+)", text)
    if file:
        # NAME=FILE.toml
        draft = _from_file(text, file[1].strip(), Path(os.path.expanduser(file[2].strip())), base)
    elif name == "ppo" and rest and not _is_assignment(rest):
        # ppo:RUN_FOLDER
        draft = _Draft(name, {"run": {"controller": f"checkpoint:{rest}"}})
    elif not colon or name in (*SAVED, "schedule") or "=" not in rest:
        # A controller; _check_controller refuses an unknown one.
        draft = _Draft(text, {"run": {"controller": text}})
    else:
        # NAME:controller=CONTROLLER,...
        draft = _inline(text, name.strip(), rest)
    run = {**_section(base, "run"), **_section(draft.tables, "run")}
    draft.controller = str(run.get("controller", ""))
    _check_controller(draft)
    if not file:
        check_effects(draft.tables, _unread(draft), f"--arm {text}: ")
    return draft


def _is_assignment(rest: str) -> bool:
    """Whether the text after the colon sets a value, and is not a path that has an equals sign in it."""
    return re.match(r"\s*(controller|of|[a-z]+\.[\w.]+)\s*=", rest) is not None


def _from_file(text: str, name: str, path: Path, base: Tables) -> _Draft:
    """Reads ``NAME=FILE.toml``."""
    if path.suffix != ".toml":
        raise ConfigError(f"--arm {text}: {path} is not a .toml file; an arm is one of: {forms()}")
    tables = read_toml(path)
    task = str(_section(tables, "task").get("name"))
    from_run = (path.parent / "env.json").exists()
    if from_run and is_user_task(task) and _section(base, "task").get("name") != task:
        raise refuse_untrusted("task", task, str(path))  # only a run folder names this code, and not the user
    controller = str(_section(tables, "run").get("controller"))
    if from_run and ControllerSpec.of(controller).is_code:
        raise refuse_untrusted("controller", controller, str(path), "--arm")
    return _Draft(name, tables)


def _inline(text: str, name: str, rest: str) -> _Draft:
    """Parses ``NAME:controller=CONTROLLER,SECTION.KEY=VALUE,...``."""
    draft = _Draft(name, {})
    # A comma ends a value only in front of another key and its equals sign.
    for assignment in re.split(r",(?=\s*[\w.-]+\s*=)", rest):
        key, _, value = map(str.strip, assignment.partition("="))
        if key == "of":
            draft.control_of = value.strip("\"'")
            continue
        if key == "controller":
            key = "run.controller"
        try:
            set_dotted(draft.tables, f"{key}={value}")
        except ConfigError:
            raise ConfigError(
                f"--arm {text}: expected controller=..., of=... or SECTION.KEY=VALUE, got {assignment.strip()!r}"
            ) from None
    if "controller" not in _section(draft.tables, "run") and _is_controller(ControllerSpec.of(name)):
        # CONTROLLER:SECTION.KEY=VALUE,... is its own name.
        draft.tables.setdefault("run", {})["controller"] = name
        draft.name = text
    return draft


def _unread(draft: _Draft) -> dict[str, str]:
    """Returns the values that have no effect on the arm, and why."""
    # An arm that learns plays rounds of its own, writes checkpoints, and reads the section ppo.
    if draft.spec.learns:
        return {**NEVER_READ}
    return {**NEVER_READ, **READ_ONLY_WHILE_LEARNING}


def reference_of(arms: Sequence[Arm], named: str | None) -> str:
    """Returns the arm that the others are compared with: ``named``, else the first that leaves hosts alone, else the
    last. Raises ConfigError if there are fewer than two arms, or none of that name."""
    names = [arm.name for arm in arms]
    if len(names) < 2:
        present = f"only {names[0]}" if names else "no arm"
        raise ConfigError(f"a comparison needs two or more --arm; got {present}")
    alone = [arm.name for arm in arms if arm.alone]
    reference = named
    if named is None:
        reference = alone[0] if alone else names[-1]
    if reference not in names:
        raise ConfigError(f"the reference must be one of the arms {', '.join(names)}; got {reference!r}")
    return reference


def check_effects(tables: Mapping[str, Any], unread: Mapping[str, str], where: str = "") -> None:
    """Raises ConfigError if ``tables`` set a value that is ``unread``: SECTION.KEY or a whole section, and why."""
    for dotted, why in unread.items():
        section, _, key = dotted.partition(".")
        for name in _section(tables, section):
            if name == key or not key:
                raise ConfigError(f"{where}{section}.{name} has no effect here: {why}")


UNREAD = dict.fromkeys(
    ("task.name", "run.controller", *READ_ONLY_WHILE_LEARNING),
    "a trained agent plays unchanged; choose its hosts with --task and --pairs",
)
"""Values that have no effect where a trained agent is evaluated, or have their own option, and why."""


def check_changes(changes: dict[str, Any]) -> None:
    """Raises ConfigError unless ``changes`` are tables of valid values that have an effect in an evaluation."""
    check_effects(changes, UNREAD)
    TrainingConfig.parse(changes)


def _is_controller(spec: ControllerSpec) -> bool:
    return spec.known or spec.name in CONTROL_NAMES


def _check_controller(draft: _Draft) -> None:
    if not draft.controller:
        names = ", ".join((*NAMES, *CONTROL_NAMES))
        raise ConfigError(f"arm {draft.name!r} has no controller; give it one of: {names}")
    if not _is_controller(draft.spec):
        similar = did_you_mean(draft.spec.kind, (*NAMES, *CONTROL_NAMES))
        raise ConfigError(f"unknown controller {draft.controller!r}{similar}; an arm is one of: {forms()}")
    if draft.control_of is not None and draft.controller not in CONTROL_NAMES:
        raise ConfigError(
            f"arm {draft.name!r}: of= applies only to {', '.join(CONTROL_NAMES)}, not to {draft.controller}"
        )


def _controlled(draft: _Draft, default: str | None, growing: Sequence[str]) -> str:
    """Returns the arm that a control is made for."""
    named = default if draft.control_of is None else draft.control_of
    if named is None:
        if not growing:
            raise ConfigError(f"{draft.name} is made for an arm that grows hosts: add one, such as --arm heuristic")
        return growing[0]
    if named not in growing:
        raise ConfigError(
            f"{draft.name} is made for an arm that grows hosts, and {named!r} is not one; these arms do: "
            f"{', '.join(growing) or 'none'}"
        )
    return named


def _common(drafts: Mapping[str, _Draft], base: Tables) -> Tables:
    """Returns the values of SHARED that any arm or ``base`` sets, for all arms. Raises ConfigError if they conflict."""
    # The first one that states a value is named in the error, too.
    common: Tables = {}
    sources = {"the shared config": base}
    for name, draft in drafts.items():
        sources[f"arm {name!r}"] = draft.tables
    for (section, key), why in SHARED.items():
        first = None
        for source, tables in sources.items():
            values = _section(tables, section)
            if key not in values:
                continue
            if first is None:
                first = source
                common.setdefault(section, {})[key] = values[key]
            elif values[key] != common[section][key]:
                raise ConfigError(
                    f"{section}.{key} must be the same for all arms, because {why}; {first} has "
                    f"{common[section][key]!r}, {source} has {values[key]!r}"
                )
    return common


def _section(tables: Mapping[str, Any], name: str) -> Tables:
    section = tables.get(name, {})
    return section if isinstance(section, dict) else {}
