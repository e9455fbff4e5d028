"""Learned controllers by name: a run, a checkpoint, a policy file, or the pretrained one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.config import ConfigError, TrainingConfig, read_toml
from esper.files import checkpoint, policy_file

WHICH = "give the folder of a ppo run, its checkpoint.pt, a policy in a .safetensors file, or pretrained"


@dataclass(frozen=True)
class Learned:
    """A learned controller."""

    name: str
    """The name it was requested by."""
    policy: checkpoint.State
    config: TrainingConfig | None
    """Config of its run; None for a checkpoint outside a run folder."""
    rounds: int
    """Number of rounds that its run has played."""
    folder: Path | None
    """Folder of its run; None if that is not at hand."""

    @property
    def origin(self) -> str:
        """Describes where it learned; empty if that is unknown."""
        if self.config is None:
            return ""
        run = self.config.run
        if not run.learns:
            return f"played as {run.controller} on {self.config.task.name}"
        return f"learned on {self.config.task.name}, {self.rounds} of {run.rounds} rounds, seed {run.seed}"

    def own(self) -> tuple[TrainingConfig, dict[str, str]]:
        """Returns the config of its run and the package versions used there.

        Raises:
            ConfigError: it did not learn in the run that it was loaded from. A policy file describes the run that made
                it.
        """
        if self.folder is None or self.config is None or not self.config.run.learns:
            raise ConfigError(
                f"{self.name} is not a run in which an agent learned; only such a run can be saved as a policy"
            )
        file = self.folder / "env.json"
        try:
            return self.config, json.loads(file.read_text(encoding="utf-8"))["packages"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{file} cannot be read for the package versions of the run: {error}") from None


def find_learned(name: str) -> Learned:
    """Returns the controller called ``name``; a path may be prefixed with ``checkpoint:``.

    Raises:
        ConfigError: nothing is there, it is not a policy, or the run's controller does not learn.
    """
    path = policy_file.PRETRAINED if name == "pretrained" else Path(name.removeprefix("checkpoint:"))
    if path.suffix == policy_file.SUFFIX and not path.is_dir():
        found = policy_file.read(path)
        return Learned(name, found.policy, found.config, found.facts.rounds, folder=None)
    if not path.exists():
        raise ConfigError(f"no checkpoint at {path}; {WHICH}")
    state = checkpoint.read(path)
    folder = run_folder(path)
    config = None if folder is None else _config_of(folder / "config.toml")
    if state["policy"] is None:
        does = "" if config is None else f", {config.run.controller},"
        raise ConfigError(
            f"{name} contains no policy: its controller{does} does not learn. To evaluate a controller without a "
            f"policy, use `esper compare`, for example with --arm heuristic --arm none. Otherwise {WHICH}"
        )
    return Learned(name, state["policy"], config, int(state["round"]), folder)


def _config_of(file: Path) -> TrainingConfig:
    """Returns the config in ``file``. Raises ConfigError naming the file, because the user did not type its values."""
    tables = read_toml(file)
    try:
        return TrainingConfig.parse(tables)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def run_folder(path: Path) -> Path | None:
    """Returns the run folder that contains the checkpoint, or None if it was moved out of one."""
    folder = path if path.is_dir() else path.parent
    return folder if (folder / "config.toml").is_file() and (path.is_dir() or path.name == checkpoint.NAME) else None


def save_policy(run: Learned | Path | str, file: Path | str, score: Mapping[str, Any] | None = None) -> None:
    """Saves what the agent of a run has learned to ``file`` (FILE.safetensors), for ``--controller checkpoint:FILE``.

    Args:
        run: folder of a ppo run, or the checkpoint in it.
        score: measured performance, ready for JSON; stored in the file.

    Raises:
        ConfigError: there is no such run, its controller did not learn in it, or ``file`` is not a valid target.
        OSError: the file cannot be written.
    """
    target = check_target(file)
    learned = run if isinstance(run, Learned) else find_learned(str(run))
    config, packages = learned.own()
    policy_file.write(target, learned.policy, config, learned.rounds, packages, score)


def check_target(file: Path | str) -> Path:
    """Returns the path of a new policy file. Raises ConfigError if it exists, has another suffix, or has no folder."""
    target = Path(file)
    if target.suffix != policy_file.SUFFIX or target.exists() or not target.absolute().parent.is_dir():
        raise ConfigError(f"{target}: give a new file, NAME{policy_file.SUFFIX}, in an existing folder")
    return target
