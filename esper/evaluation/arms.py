"""Arms of a comparison: parsing their names, the config of each, and checks that they can be compared."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from esper.config import ConfigError, TrainingConfig, read_toml, set_dotted
from esper.data.user_task import is_user_task, refuse_untrusted
from esper.evaluation.controls import CONTROLS
from esper.rollout.policies import NAMES

Tables = dict[str, Any]

ALONE = ("none", "no-growth")
BUILT_IN = ("no-growth", *CONTROLS, "random", "heuristic", "schedule", "pretrained", "ppo:RUN_FOLDER")
FORMS = (
    f"{', '.join(BUILT_IN)}; schedule:FILE.toml; NAME=FILE.toml; or NAME:controller=CONTROLLER,SECTION.KEY=VALUE,..."
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
    "run.rounds": "--pairs sets the number of hosts",
    "run.evaluation_pairs": "--pairs sets the number of hosts",
    "run.checkpoint_every": "every finished round is saved",
    "ppo": "no arm learns during a comparison; train the agent with `esper run` and name its run folder",
}
"""Values that an arm must not set, and why; in a file, which may be a run's config, they are ignored."""


@dataclass(frozen=True)
class Arm:
    """One arm, validated as far as possible without its task."""

    name: str
    controller: str
    """A controller, or a key of CONTROLS."""
    config: TrainingConfig
    of: str | None = None
    """The arm whose hosts a control is made for."""

    @property
    def grows(self) -> bool:
        return self.controller not in (*ALONE, *CONTROLS)

    @property
    def plays(self) -> str:
        """The controller's name as known to ``make_player``."""
        return "none" if self.controller in ALONE else self.controller


@dataclass
class _Draft:
    name: str
    controller: str | None
    tables: Tables = field(default_factory=dict)
    """Its own config values."""
    of: str | None = None
    file: Path | None = None
    """The file that it was read from."""


def read_arms(texts: Sequence[str], base: Tables, of: str | None = None) -> list[Arm]:
    """Returns the arms named by ``texts``, in order; the config of each is ``base`` with its own values on top.

    A control inherits the values of the arm that it is made for: the one that it names (``of=NAME``), else ``of``, else
    the first arm that grows hosts.

    Raises:
        ConfigError: two arms have the same name, a text or config is invalid, arms differ in values that they must
            share, or a control has no arm that grows hosts.
    """
    drafts = [_read(text) for text in texts]
    for draft in drafts:
        _check_trust(draft, base)
    names = [draft.name for draft in drafts]
    if len(set(names)) < len(names):
        raise ConfigError(f"two arms have the same name: {', '.join(names)}")
    controllers = {draft.name: _controller(draft, base) for draft in drafts}
    common = _common(drafts, base)
    growing = [name for name in names if controllers[name] not in (*ALONE, *CONTROLS)]
    leaders = {draft.name: _leader(draft, controllers[draft.name], of, growing) for draft in drafts}
    tables = {draft.name: draft.tables for draft in drafts}
    arms = []
    for draft in drafts:
        leader = leaders[draft.name]
        layers = [base, *([tables[leader]] if leader else []), draft.tables, common]
        merged = _merged(layers)
        merged.setdefault("run", {})["controller"] = controllers[draft.name]
        arms.append(Arm(draft.name, controllers[draft.name], _parsed(draft.name, merged), leader))
    return arms


def _read(text: str) -> _Draft:
    """Parses one ``--arm``."""
    file = re.fullmatch(r"([^:=]+)=(.+)", text)
    if file is not None:
        name, path = file[1].strip(), Path(file[2].strip())
        if path.suffix != ".toml":
            raise ConfigError(f"--arm {text}: {path} is not a .toml file; an arm is one of: {FORMS}")
        return _Draft(name, None, read_toml(path), file=path)
    name, colon, rest = text.partition(":")
    if not colon or name in ("checkpoint", "schedule"):
        return _Draft(text, text)
    if name == "ppo" and rest:
        return _Draft(name, f"checkpoint:{rest}")
    if "=" not in rest:
        return _Draft(text, text)  # not a known controller: _controller raises the error
    return _inline(text, name.strip(), rest)


def _check_trust(draft: _Draft, base: Tables) -> None:
    """Raises ConfigError for a task's code that only a run folder's config names, and not the user."""
    task = _section(draft.tables, "task").get("name")
    of_a_run = draft.file is not None and (draft.file.parent / "env.json").exists()
    if of_a_run and is_user_task(str(task)) and _section(base, "task").get("name") != task:
        raise refuse_untrusted(str(task), str(draft.file))


def _inline(text: str, name: str, rest: str) -> _Draft:
    draft = _Draft(name, None)
    for assignment in re.split(r",(?=\s*[\w.-]+\s*=)", rest):
        key, _, value = (part.strip() for part in assignment.partition("="))
        if key in ("controller", "run.controller"):
            draft.controller = value.strip("\"'")
        elif key == "of":
            draft.of = value.strip("\"'")
        else:
            for known, why in WITHOUT_EFFECT.items():
                if key == known or key.startswith(f"{known}."):
                    raise ConfigError(f"--arm {text}: {key} has no effect here: {why}")
            try:
                set_dotted(draft.tables, f"{key}={value}")
            except ConfigError:
                raise ConfigError(
                    f"--arm {text}: expected controller=..., of=... or SECTION.KEY=VALUE, got {assignment.strip()!r}"
                ) from None
    return draft


def _controller(draft: _Draft, base: Tables) -> str:
    """Returns the arm's controller: its own, or else that of the common config."""
    for tables in (draft.tables, base):
        section = tables.get("run")
        if draft.controller is None and isinstance(section, dict) and "controller" in section:
            draft.controller = str(section["controller"])
    if draft.controller is None:
        raise ConfigError(
            f"arm {draft.name!r} has no controller; give it one of: {', '.join((*NAMES, 'no-growth', *CONTROLS))}"
        )
    kinds = {known.partition(":")[0] for known in NAMES}
    if draft.controller.partition(":")[0] not in kinds and draft.controller not in (*ALONE, *CONTROLS):
        raise ConfigError(f"unknown controller {draft.controller!r}; an arm is one of: {FORMS}")
    if draft.of is not None and draft.controller not in CONTROLS:
        raise ConfigError(f"arm {draft.name!r}: of= applies only to {', '.join(CONTROLS)}, not to {draft.controller}")
    return draft.controller


def _leader(draft: _Draft, controller: str, of: str | None, growing: Sequence[str]) -> str | None:
    if controller not in CONTROLS:
        return None
    leader = draft.of or of or (growing[0] if growing else None)
    if leader is None:
        raise ConfigError(f"{draft.name} is made for an arm that grows hosts: add one, such as --arm heuristic")
    if leader not in growing:
        known = ", ".join(growing) or "none"
        raise ConfigError(
            f"{draft.name} is made for an arm that grows hosts, and {leader!r} is not one; these arms do: {known}"
        )
    return leader


def _common(drafts: Sequence[_Draft], base: Tables) -> Tables:
    """Returns the values of SHARED that any arm or ``base`` sets, for all arms. Raises ConfigError if they conflict."""
    common: Tables = {}
    for (section, key), why in SHARED.items():
        stated = {"the shared config": base} | {f"arm {draft.name!r}": draft.tables for draft in drafts}
        given = {who: tables[section][key] for who, tables in stated.items() if key in _section(tables, section)}
        first, *rest = [*given.items()] or [("", None)]
        for who, value in rest:
            if value != first[1]:
                raise ConfigError(
                    f"{section}.{key} must be the same for all arms, because {why}; {first[0]} has {first[1]!r}, "
                    f"{who} has {value!r}"
                )
        if given:
            common.setdefault(section, {})[key] = first[1]
    return common


def _section(tables: Tables, name: str) -> Tables:
    section = tables.get(name, {})
    return section if isinstance(section, dict) else {}


def _merged(layers: Sequence[Tables]) -> Tables:
    """Merges nested tables; later layers take precedence."""
    merged: Tables = {}
    for tables in layers:
        for key, value in tables.items():
            both = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = _merged([merged[key], value]) if both else copy.deepcopy(value)
    return merged


def _parsed(name: str, tables: Tables) -> TrainingConfig:
    try:
        return TrainingConfig.parse(tables)
    except ConfigError as error:
        raise ConfigError(f"arm {name!r}: {error}") from None
