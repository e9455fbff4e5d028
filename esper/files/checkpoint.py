"""Checkpoints of runs: files that are whole or refused, and run no code when they are read.

A file is a line with the format, a line with the SHA-256 of what follows, and what ``torch.save`` writes. A run keeps
the last two, so that a torn one costs no more than what was done since the one before it.
"""

from __future__ import annotations

import hashlib
import io
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from esper.config import ConfigError, TrainingConfig
from esper.env.slot_env import SlotVectorEnv
from esper.files import policy_file
from esper.files.atomic import write_atomic
from esper.ppo.policy import Policy

FORMAT = 3
MARK = b"Esper checkpoint, format "
NAME, PREVIOUS, CONFIG = "checkpoint.pt", "checkpoint.previous.pt", "config.toml"
KEYS: dict[str, tuple[type, ...]] = {
    "config": (str,),
    "round": (int,),
    "finished": (bool,),
    "best": (float,),
    "seconds": (float,),
    "baseline": (dict,),
    "logs": (dict,),
    "rounds": (dict,),
    "policy": (dict, type(None)),
}
MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What values of another form lead to."""

State = dict[str, Any]
"""Nested dicts and lists of tensors, numbers, strings and None."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """The newest checkpoint of a run that can be used."""

    state: State
    file: Path
    refused: tuple[str, ...]
    """Why newer ones were not, by file."""


def encode(state: State) -> bytes:
    """The content of a checkpoint file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    return b"%s%d\n%s\n%s" % (MARK, FORMAT, hashlib.sha256(content).hexdigest().encode(), content)


def write(folder: Path, content: bytes, keep: bool = True) -> None:
    """Make it the run's checkpoint, and keep the one before: whenever this is cut short, one of them is there. Without
    ``keep`` the last one, which is broken, goes, and the one before that stays."""
    write_atomic(folder / NAME, content, previous=folder / PREVIOUS if keep else None)


def files(folder: Path) -> list[Path]:
    """The checkpoints in the folder of a run, newest first."""
    return [folder / name for name in (NAME, PREVIOUS) if (folder / name).exists()]


def config_digest(folder: Path) -> str:
    """What a checkpoint knows its run's configuration by. Raises ConfigError where the file cannot be read."""
    file = folder / CONFIG
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None


def read(path: Path) -> State:
    """The state in a checkpoint file, or the newest one of a run in its folder; a newer one that cannot be used is
    logged.

    Raises:
        ConfigError: no file, or not a checkpoint that this Esper reads.
    """
    if not path.is_dir():
        return read_file(path)
    found = newest(path)
    for why in found.refused:
        logger.warning("%s; the checkpoint before it is used", why)
    return found.state


def newest(folder: Path) -> Found:
    """The newest checkpoint in ``folder`` that is whole and, where the run's config lies there, was written under it.
    Raises ConfigError when there is none, with what is wrong with those that there are."""
    config = config_digest(folder) if (folder / CONFIG).exists() else None
    refused: list[str] = []
    for file in files(folder) or [folder / NAME]:
        try:
            state = read_file(file)
            if config is not None and state["config"] != config:
                raise ConfigError(
                    f"{file} belongs to a run with another configuration than {folder / CONFIG}: one of the two "
                    "was changed or is from elsewhere"
                )
            return Found(state, file, tuple(refused))
        except ConfigError as error:
            refused.append(str(error))
    raise ConfigError("; ".join(refused))


def read_file(file: Path) -> State:
    """A checkpoint file's state. Only tensors and plain values are read, and nothing in the file is executed.

    Raises:
        ConfigError: no file, one that is torn or was changed, or not a checkpoint that this Esper reads.
    """
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"no checkpoint at {file}; give the folder of a run that has measured its baseline") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    try:
        state = torch.load(io.BytesIO(_checked(content)), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the bytes of another file lead to
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{file} is not a checkpoint: {why}") from None
    if not isinstance(state, dict):
        raise ConfigError(f"{file} is not a checkpoint: something else was saved in it")
    missing = sorted(key for key, kinds in KEYS.items() if type(state.get(key, ...)) not in kinds)
    if missing:
        raise ConfigError(f"{file} is not a checkpoint of a run: it has no {', '.join(missing)}")
    return state


def _checked(content: bytes) -> bytes:
    """What was saved, out of a file's content. Raises ValueError where it is not what was written."""
    head, _, rest = content.partition(b"\n")
    if not head.startswith(MARK):
        raise ValueError("it does not begin as one of this format does")
    if head != b"%s%d" % (MARK, FORMAT):
        raise ValueError(f"its format is {head[len(MARK) :][:20].decode(errors='replace')}; this Esper reads {FORMAT}")
    digest, _, saved = rest.partition(b"\n")
    if hashlib.sha256(saved).hexdigest().encode() != digest:
        raise ValueError("it is torn or was changed: its SHA-256 is not the one that was written into it")
    return saved


def policy_state(policy: Policy) -> State:
    """What it takes to act as this policy does elsewhere."""
    return {
        **policy.policy_state(),
        "config": policy.config.model_dump(mode="json"),
    }


def load_policy(path: Path, env: SlotVectorEnv, run_seed: int, greedy: bool = True) -> Policy:
    """The policy of a checkpoint, or of a file of ``policy_file``, for the envs of ``env``; see :func:`policy_from`.

    Raises:
        ConfigError: no checkpoint, one of a controller that does not learn, or one that knows no blueprint of the host.
    """
    if path.suffix == policy_file.SUFFIX:
        return policy_from(policy_file.read(path).policy, str(path), env, run_seed, greedy)
    state = read(path)["policy"]
    if state is None:
        raise ConfigError(f"{path} holds no policy: its controller does not learn")
    return policy_from(state, str(path), env, run_seed, greedy)


def policy_from(state: State, where: str, env: SlotVectorEnv, run_seed: int, greedy: bool = True) -> Policy:
    """The policy with that state, which was read from ``where``, for the envs of ``env``.

    Their hosts may have other slots than those it learned from, and other blueprints as long as it knows one of them:
    one that it does not know it plants as it would the average of those that it knows.

    Raises:
        ConfigError: a policy that knows no blueprint of the host, or is of another network.
    """
    try:
        config = TrainingConfig.parse({"ppo": state["config"], "reward": {"gamma": state["config"]["gamma"]}}).ppo
        policy = Policy(env.action_spec, env.layout, env.num_envs, config, run_seed, greedy=greedy)
        policy.load_policy_state(state)
    except ValueError as error:
        raise ConfigError(f"{where} cannot play this host: {error}") from None
    except RuntimeError as error:
        raise ConfigError(f"{where} was trained with another network or observation: {error}") from None
    except MISFITS as error:
        raise ConfigError(f"{where} holds no policy that this Esper reads: {error}") from None
    return policy
