"""Checkpoints of runs: one file that is whole or not there, and runs no code when it is read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from esper.config import ConfigError, TrainingConfig
from esper.env.slot_env import SlotVectorEnv
from esper.experiment import policy_file
from esper.experiment.files import write_atomic
from esper.ppo.policy import Policy

FORMAT = 2
NAME = "checkpoint.pt"
KEYS = {"round", "finished", "best", "seconds", "baseline", "logs", "rounds", "policy"}

State = dict[str, Any]
"""Nested dicts and lists of tensors, numbers, strings and None."""


def encode(state: State) -> bytes:
    """The content of a checkpoint file."""
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **state}, buffer)
    return buffer.getvalue()


def write(folder: Path, content: bytes) -> None:
    """Replace the run's checkpoint: readers find the old one or the new one, never a part."""
    write_atomic(folder / NAME, content)


def read(path: Path) -> State:
    """A checkpoint's state; ``path`` is its file or the folder of its run.

    Only tensors and plain values are read, and nothing in the file is executed.

    Raises:
        ConfigError: no file, or not a checkpoint that this Esper reads.
    """
    file = path / NAME if path.is_dir() else path
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"no checkpoint at {file}; give the folder of a run that has measured its baseline") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the bytes of another file lead to
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{file} is not a checkpoint: {why}") from None
    if not isinstance(state, dict) or "format" not in state:
        raise ConfigError(f"{file} is not a checkpoint: something else was saved in it")
    if state["format"] != FORMAT:
        raise ConfigError(f"{file} has checkpoint format {state['format']}; this Esper reads format {FORMAT}")
    missing = KEYS - set(state)
    if missing:
        raise ConfigError(f"{file} is not a checkpoint of a run: it has no {', '.join(sorted(missing))}")
    return state


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
    config = TrainingConfig.parse({"ppo": state["config"], "reward": {"gamma": state["config"]["gamma"]}}).ppo
    policy = Policy(env.action_spec, env.layout, env.num_envs, config, run_seed, greedy=greedy)
    try:
        policy.load_policy_state(state)
    except ValueError as error:
        raise ConfigError(f"{where} cannot play this host: {error}") from None
    except RuntimeError as error:
        raise ConfigError(f"{where} was trained with another network or observation: {error}") from None
    return policy
