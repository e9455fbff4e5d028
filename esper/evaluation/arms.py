"""Arms of a comparison: parsing their names, the config of each, and checks that they can be compared."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.config import ConfigError, RunConfig, TrainingConfig, did_you_mean, read_toml, set_dotted
from esper.data.user_code import FORM, is_user_code, is_user_task, refuse_untrusted
from esper.evaluation.alternatives import CONTROLS
from esper.rollout.policies import NAMES

Tables = dict[str, Any]
"""A config as nested tables, as in a TOML file."""

ALONE = ("none", "no-growth")
BUILT_IN = (
    *("no-growth", *CONTROLS, "random", "heuristic", "plateau", "schedule"),
    *("ppo", "plans", "pretrained", "ppo:RUN_FOLDER", "plans:RUN_FOLDER"),
)
FORMS = (
    f"{', '.join(BUILT_IN)}; schedule:FILE.toml; {FORM}; NAME=FILE.toml; CONTROLLER:SECTION.KEY=VALUE,...; or "
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

WITHOUT_EFFECT: Mapping[str, str] = {
    "run.evaluation_pairs": "--pairs sets the number of hosts",
    "run.rounds": "--pairs sets the number of hosts",
    "run.checkpoint_every": "every finished round is saved",
    "ppo": "this arm does not learn during the comparison; ones whose controllers learn are ppo and plans",
}
"""Values that an arm must not set, and why; in a file, which may be a run's config, they are ignored. All but the first
have an effect on an arm that learns."""


@dataclass(frozen=True)
class Arm:
    """One arm, validated as far as possible without its task."""

    name: str
    controller: str
    """A controller, or a key of CONTROLS."""
    config: TrainingConfig
    control_of: str | None = None
    """The arm whose hosts a control is made for."""

    @property
    def alone(self) -> bool:
        """Whether it leaves hosts alone."""
        return self.controller in ALONE

    @property
    def learns(self) -> bool:
        """Whether it is an agent that is trained by the comparison."""
        return self.config.run.learns

    def plain(self) -> dict[str, Any]:
        """Returns all but the name, ready for JSON."""
        config = self.config.model_dump(mode="json")
        return {"controller": self.controller, "of": self.control_of, "config": config}


@dataclass
class _Draft:
    """An arm as it is written, without the values that it shares or inherits."""

    name: str
    tables: Tables
    control_of: str | None = None
    controller: str = ""


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
    growing = [name for name, draft in drafts.items() if draft.controller not in (*ALONE, *CONTROLS)]
    arms = []
    for name, draft in drafts.items():
        grown = _controlled(draft, control_of, growing) if draft.controller in CONTROLS else None
        tables = merged(base, drafts[grown].tables if grown else {}, draft.tables, common)
        if isinstance(run := tables.setdefault("run", {}), dict):  # parse() refuses anything else
            run["controller"] = draft.controller
        try:
            config = TrainingConfig.parse(tables)
        except ConfigError as error:
            raise ConfigError(f"arm {name!r}: {error}") from None
        arms.append(Arm(name, draft.controller, config, grown))
    return arms


def merged(*layers: Mapping[str, Any]) -> Tables:
    """Returns a copy of nested tables merged into one; later layers take precedence."""
    result: Tables = {}
    for tables in layers:
        for key, value in tables.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else copy.deepcopy(value)
    return result


def _read(text: str, base: Tables) -> _Draft:
    """Parses one ``--arm``; a controller that it does not name is that of ``base``."""
    name, colon, rest = text.partition(":")
    if file := re.fullmatch(r"([^:=]+)=(.+)", text):
        draft = _from_file(text, file[1].strip(), Path(file[2].strip()), base)
    elif name == "ppo" and rest and not _is_assignment(rest):
        draft = _Draft(name, {"run": {"controller": f"checkpoint:{rest}"}})
    elif not colon or name in ("checkpoint", "schedule") or "=" not in rest:
        draft = _Draft(text, {"run": {"controller": text}})  # _check_controller refuses an unknown one
    else:
        draft = _inline(text, name.strip(), rest)
    run = {**_section(base, "run"), **_section(draft.tables, "run")}
    draft.controller = str(run.get("controller", ""))
    _check_controller(draft)
    if not file:
        _check_effects(text, draft)
    return draft


def _is_assignment(rest: str) -> bool:
    """Whether the text after the colon sets a value, and is not a path that has an equals sign in it."""
    return re.match(r"\s*(controller|of|[a-z]+\.[\w.]+)\s*=", rest) is not None


def _from_file(text: str, name: str, path: Path, base: Tables) -> _Draft:
    """Reads ``NAME=FILE.toml``."""
    if path.suffix != ".toml":
        raise ConfigError(f"--arm {text}: {path} is not a .toml file; an arm is one of: {FORMS}")
    tables = read_toml(path)
    task = str(_section(tables, "task").get("name"))
    from_run = (path.parent / "env.json").exists()
    if from_run and is_user_task(task) and _section(base, "task").get("name") != task:
        raise refuse_untrusted("task", task, str(path))  # only a run folder names this code, and not the user
    controller = str(_section(tables, "run").get("controller"))
    if from_run and is_user_code(controller):
        raise refuse_untrusted("controller", controller, str(path), "--arm")
    return _Draft(name, tables)


def _inline(text: str, name: str, rest: str) -> _Draft:
    """Parses ``NAME:controller=CONTROLLER,SECTION.KEY=VALUE,...``."""
    draft = _Draft(name, {})
    for assignment in re.split(r",(?=\s*[\w.-]+\s*=)", rest):
        key, _, value = (part.strip() for part in assignment.partition("="))
        if key == "of":
            draft.control_of = value.strip("\"'")
            continue
        try:
            set_dotted(draft.tables, f"{'run.controller' if key == 'controller' else key}={value}")
        except ConfigError:
            raise ConfigError(
                f"--arm {text}: expected controller=..., of=... or SECTION.KEY=VALUE, got {assignment.strip()!r}"
            ) from None
    if "controller" not in _section(draft.tables, "run") and _is_controller(name):
        draft.tables.setdefault("run", {})["controller"], draft.name = name, text
    return draft


def _check_effects(text: str, draft: _Draft) -> None:
    """Raises ConfigError if the arm sets a value of WITHOUT_EFFECT itself."""
    learns = RunConfig(controller=draft.controller).learns
    without_effect = dict(list(WITHOUT_EFFECT.items())[: 1 if learns else None])
    if learns and draft.controller != "ppo":
        without_effect["ppo"] = f"{draft.controller} does not learn by it"
    for known, why in without_effect.items():
        section, _, key = known.partition(".")
        own = _section(draft.tables, section)
        if found := next((name for name in own if name == key or not key), None):
            raise ConfigError(f"--arm {text}: {section}.{found} has no effect here: {why}")


def _is_controller(name: str) -> bool:
    return name in (*ALONE, *CONTROLS) or name in NAMES or is_user_code(name)


def _check_controller(draft: _Draft) -> None:
    kind = draft.controller.partition(":")[0]
    if not kind:
        known = ", ".join((*NAMES, "no-growth", *CONTROLS))
        raise ConfigError(f"arm {draft.name!r} has no controller; give it one of: {known}")
    known_kinds = {known.partition(":")[0] for known in NAMES}
    if kind not in known_kinds and draft.controller not in (*ALONE, *CONTROLS) and not is_user_code(draft.controller):
        similar = did_you_mean(kind, (*known_kinds, *ALONE, *CONTROLS))
        raise ConfigError(f"unknown controller {draft.controller!r}{similar}; an arm is one of: {FORMS}")
    if draft.control_of is not None and draft.controller not in CONTROLS:
        raise ConfigError(f"arm {draft.name!r}: of= applies only to {', '.join(CONTROLS)}, not to {draft.controller}")


def _controlled(draft: _Draft, default: str | None, growing: Sequence[str]) -> str:
    """Returns the arm that a control is made for."""
    named = draft.control_of or default
    if named is None and not growing:
        raise ConfigError(f"{draft.name} is made for an arm that grows hosts: add one, such as --arm heuristic")
    if named is not None and named not in growing:
        raise ConfigError(
            f"{draft.name} is made for an arm that grows hosts, and {named!r} is not one; these arms do: "
            f"{', '.join(growing) or 'none'}"
        )
    return named or growing[0]


def _common(drafts: Mapping[str, _Draft], base: Tables) -> Tables:
    """Returns the values of SHARED that any arm or ``base`` sets, for all arms. Raises ConfigError if they conflict."""
    common: Tables = {}
    stated = {"the shared config": base} | {f"arm {name!r}": draft.tables for name, draft in drafts.items()}
    for (section, key), why in SHARED.items():
        given = [(who, tables[section][key]) for who, tables in stated.items() if key in _section(tables, section)]
        for who, value in given[1:]:
            if value != given[0][1]:
                raise ConfigError(
                    f"{section}.{key} must be the same for all arms, because {why}; {given[0][0]} has "
                    f"{given[0][1]!r}, {who} has {value!r}"
                )
        if given:
            common.setdefault(section, {})[key] = given[0][1]
    return common


def _section(tables: Tables, name: str) -> Tables:
    section = tables.get(name, {})
    return section if isinstance(section, dict) else {}
