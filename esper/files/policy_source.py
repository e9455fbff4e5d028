"""Trained agents by name: a run folder, its checkpoint, a policy file, or ``pretrained``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.config import ConfigError, TrainingConfig, read_toml
from esper.env.slot_env import SlotVectorEnv
from esper.files import checkpoint, policy_file
from esper.ppo.policy import Policy

PRETRAINED = Path(__file__).parent / "pretrained" / "digits.safetensors"
"""The agent shipped with Esper."""

VALID = "give the folder of a ppo run, its checkpoint.pt, a policy in a .safetensors file, or pretrained"


@dataclass(frozen=True)
class SavedPolicy:
    """A trained agent's policy, read from a file."""

    name: str
    """The name it was requested by."""
    state: checkpoint.State
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

    def player(self, env: SlotVectorEnv, run_seed: int, greedy: bool = True) -> Policy:
        """Returns the policy for the envs of ``env``.

        The hosts may have other slots than those it learned on, and other blueprints as long as it knows at least one.
        An unknown blueprint is treated as the average of the known ones.

        Raises:
            ConfigError: the policy knows no blueprint of the host, or has another network.
        """
        try:
            ppo = self.state["config"]
            config = TrainingConfig.parse({"ppo": ppo, "reward": {"gamma": ppo["gamma"]}}).ppo
            policy = Policy(env.action_spec, env.layout, env.num_envs, config, run_seed, greedy=greedy)
            policy.load_policy_state(self.state)
        except ValueError as error:
            raise ConfigError(f"{self.name} cannot play this host: {error}") from None
        except RuntimeError as error:
            raise ConfigError(f"{self.name} was trained with a different network or observation: {error}") from None
        except checkpoint.MISFITS as error:
            raise ConfigError(f"{self.name} contains no policy that this version of Esper can read: {error}") from None
        return policy

    def provenance(self) -> tuple[TrainingConfig, dict[str, str]]:
        """Returns the config of the run in which it learned and the package versions used there.

        Raises:
            ConfigError: it was not loaded from the run in which it learned, or the versions cannot be read.
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


def policy_path(name: str) -> Path:
    """Returns the path that ``name`` refers to; it is ``pretrained``, PATH or ``checkpoint:PATH``."""
    return PRETRAINED if name == "pretrained" else Path(name.removeprefix("checkpoint:"))


def find_policy(name: str) -> SavedPolicy:
    """Reads the trained agent called ``name``: a run folder, its checkpoint, a policy file, or ``pretrained``.

    A path may be prefixed with ``checkpoint:``.

    Raises:
        ConfigError: nothing is there, it is not a policy, or the run's controller does not learn.
    """
    path = policy_path(name)
    if path.suffix == policy_file.SUFFIX and not path.is_dir():
        content = policy_file.read(path)
        return SavedPolicy(name, content.policy, content.config, content.facts.rounds, folder=None)
    if not path.exists():
        raise ConfigError(f"no checkpoint at {path}; {VALID}")
    state = checkpoint.read(path)
    folder = path if path.is_dir() else path.parent
    is_run = (path.is_dir() or path.name == checkpoint.NAME) and (folder / checkpoint.CONFIG).is_file()
    config = _config_of(folder / checkpoint.CONFIG) if is_run else None
    if state["policy"] is None:
        controller = f" {config.run.controller}" if config else ""
        raise ConfigError(
            f"{name} contains no policy: its controller{controller} does not learn; {VALID}. `esper compare` plays "
            "controllers that have no policy, for example with --arm heuristic --arm none"
        )
    return SavedPolicy(name, state["policy"], config, int(state["round"]), folder if is_run else None)


def _config_of(file: Path) -> TrainingConfig:
    """Returns the config in ``file``. Raises ConfigError naming the file, because the user did not type its values."""
    tables = read_toml(file)
    try:
        return TrainingConfig.parse(tables)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def save_policy(run: SavedPolicy | Path | str, file: Path | str, score: Mapping[str, Any] | None = None) -> None:
    """Saves what the agent of a run has learned to ``file`` (FILE.safetensors), for ``--controller checkpoint:FILE``.

    Args:
        run: folder of a ppo run, or the checkpoint in it.
        score: measured performance, ready for JSON; stored in the file.

    Raises:
        ConfigError: there is no such run, its controller did not learn in it, or ``file`` is not a valid target.
        OSError: the file cannot be written.
    """
    target = check_target(file)
    policy = run if isinstance(run, SavedPolicy) else find_policy(str(run))
    config, packages = policy.provenance()
    policy_file.write(target, policy.state, config, policy.rounds, packages, score)


def check_target(file: Path | str) -> Path:
    """Returns the path of a new policy file. Raises ConfigError if it exists, has another suffix, or has no folder."""
    target = Path(file)
    if target.suffix != policy_file.SUFFIX or target.exists() or not target.absolute().parent.is_dir():
        raise ConfigError(f"{target}: give a new file, NAME{policy_file.SUFFIX}, in an existing folder")
    return target
