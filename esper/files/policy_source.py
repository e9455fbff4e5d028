"""Whatever has learned, by what a person calls it: a run, a checkpoint, a policy in a file, or the one that ships."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.config import ConfigError, TrainingConfig, read_toml
from esper.files import checkpoint, policy_file

WHICH = "what can be named: the folder of a run of ppo, its checkpoint.pt, a policy in a .safetensors file, pretrained"


@dataclass(frozen=True)
class Learned:
    """A controller that has learned."""

    name: str
    """What it was called."""
    policy: checkpoint.State
    config: TrainingConfig | None
    """Of the run that it is from; None for a checkpoint that was taken out of its folder."""
    rounds: int
    """Rounds that this run has played."""
    folder: Path | None
    """Of that run, where it is there."""

    @property
    def origin(self) -> str:
        """Where it learned, in words; empty where that is not known."""
        if self.config is None:
            return ""
        run = self.config.run
        if not run.learns:
            return f"played as {run.controller} on {self.config.task.name}"
        return f"learned on {self.config.task.name}, {self.rounds} of {run.rounds} rounds, seed {run.seed}"

    def own(self) -> tuple[TrainingConfig, dict[str, str]]:
        """The config of its run and the versions that were there, for one that learned in this very run.

        Raises ConfigError for every other one: what is said of a policy in its file is of the run that made it.
        """
        if self.folder is None or self.config is None or not self.config.run.learns:
            raise ConfigError(
                f"{self.name} is not a run in which an agent learned: only from such a one it can be saved"
            )
        file = self.folder / "env.json"
        try:
            return self.config, json.loads(file.read_text(encoding="utf-8"))["packages"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{file} does not say what the run was made with: {error}") from None


def find_learned(name: str) -> Learned:
    """What ``name`` means; ``checkpoint:`` in front of a path may be there.

    Raises:
        ConfigError: nothing there, not a policy, or a run of a controller that does not learn.
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
            f"{name} holds nothing that was learned: its controller{does} does not learn, and plays alike everywhere; "
            f"`esper compare --arm heuristic --arm none` plays such ones; {WHICH}"
        )
    return Learned(name, state["policy"], config, int(state["round"]), folder)


def _config_of(file: Path) -> TrainingConfig:
    """Raises ConfigError that names the file: nobody typed its values."""
    tables = read_toml(file)
    try:
        return TrainingConfig.parse(tables)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def run_folder(path: Path) -> Path | None:
    """The folder of the run that a checkpoint lies in; None for one that was taken out of it."""
    folder = path if path.is_dir() else path.parent
    return folder if (folder / "config.toml").is_file() and (path.is_dir() or path.name == checkpoint.NAME) else None


def save_policy(run: Learned | Path | str, file: Path | str, score: Mapping[str, Any] | None = None) -> None:
    """Write what the agent of a run has learned to ``file``, FILE.safetensors, for ``--controller checkpoint:FILE``.

    Args:
        run: the folder of a run of ppo, or the checkpoint in it.
        score: what it was measured to be worth, ready for JSON; kept in the file.

    Raises:
        ConfigError: no such run, one that did not learn itself, or a name of the file that cannot be.
        OSError: the file cannot be written.
    """
    target = check_target(file)
    learned = run if isinstance(run, Learned) else find_learned(str(run))
    config, packages = learned.own()
    policy_file.write(target, learned.policy, config, learned.rounds, packages, score)


def check_target(file: Path | str) -> Path:
    """The path of a policy's file that can be written. Raises ConfigError."""
    target = Path(file)
    if target.suffix != policy_file.SUFFIX or target.exists() or not target.absolute().parent.is_dir():
        raise ConfigError(f"{target}: give a new file, NAME{policy_file.SUFFIX}, in a folder that exists")
    return target
