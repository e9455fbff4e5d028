"""Checkpoints of runs: each file is either intact or rejected, and loading one executes no code.

A file is a line with the format, a line with the SHA-256 of the rest, and the output of ``torch.save``. A run keeps the
last two checkpoints, so that a torn one costs only the work done since the one before it.
"""

from __future__ import annotations

import hashlib
import io
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from esper.agents.ppo.policy import Policy
from esper.agents.spec import require_no_pipe
from esper.config import ConfigError
from esper.files.atomic import write_atomic

FORMAT = 9
MARK = b"Esper checkpoint, format "
NAME = "checkpoint.pt"
PREVIOUS = "checkpoint.previous.pt"
CONFIG = "config.toml"
KEYS: dict[str, tuple[type, ...]] = {
    "config": (str,),
    "round": (int,),
    "finished": (bool,),
    "best": (float,),
    "seconds": (float,),
    "baseline": (dict,),
    "logs": (dict,),
    "env_steps": (int,),
    "collector": (dict,),
    "agent": (dict,),
    "policy": (dict, type(None)),
}
"""Entries of the state of a run, and the types that each may have."""
State = dict[str, Any]
"""Nested dicts and lists of tensors, numbers, strings and None."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointFile:
    """The newest usable checkpoint of a run."""

    state: State
    file: Path
    refused: tuple[str, ...]
    """Reasons for rejecting newer checkpoints, one message per file."""


def encode(state: State) -> bytes:
    """Returns the content of a checkpoint file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    digest = hashlib.sha256(content).hexdigest().encode()
    return b"%s%d\n%s\n%s" % (MARK, FORMAT, digest, content)


def write(folder: Path, content: bytes, keep: bool = True) -> None:
    """Replaces the run's checkpoint and keeps the last one as the previous: one of them exists at any moment.

    With ``keep`` False, the last one is broken: it is overwritten, and the previous one stays.
    """
    write_atomic(folder / NAME, content, previous=folder / PREVIOUS if keep else None)


def files(folder: Path) -> list[Path]:
    """Returns the checkpoints in a run folder, newest first."""
    return [file for file in (folder / NAME, folder / PREVIOUS) if file.exists()]


def config_digest(folder: Path) -> str:
    """Returns the SHA-256 that ties a checkpoint to its run's config. Raises ConfigError if that cannot be read."""
    file = folder / CONFIG
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None


def read(path: Path) -> State:
    """Returns the state of a checkpoint file, or that of the newest usable checkpoint in a run folder.

    Newer checkpoints that cannot be used are logged. Raises ConfigError as :func:`read_file` does.
    """
    if not path.is_dir():
        return read_file(path)
    checkpoint = newest(path)
    for why in checkpoint.refused:
        logger.warning("%s; using the previous checkpoint instead", why)
    return checkpoint.state


def newest(folder: Path) -> CheckpointFile:
    """Returns the newest intact checkpoint in ``folder``, written with the run's config if the folder contains one.

    Raises ConfigError without a readable checkpoint, saying what is wrong with each file.
    """
    config = config_digest(folder) if (folder / CONFIG).exists() else None
    refused: list[str] = []
    # Without any file, the one that a run would have written is named as missing.
    for file in files(folder) or [folder / NAME]:
        try:
            state = read_file(file)
            if config is not None and state["config"] != config:
                raise ConfigError(
                    f"{file} was written by a run with a different configuration than {folder / CONFIG}: one of the "
                    "two was modified or copied from another run"
                )
            return CheckpointFile(state, file, tuple(refused))
        except ConfigError as error:
            refused.append(str(error))
    raise ConfigError("; ".join(refused))


def read_file(file: Path) -> State:
    """Returns the state of one checkpoint file. Only tensors and plain values are read; no code is executed.

    Raises ConfigError if the file is missing, torn, modified, or not a checkpoint that this version of Esper can read.
    """
    require_no_pipe(file, "checkpoint")
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"no checkpoint at {file}; give the folder of a run that has written one") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    try:
        state = torch.load(io.BytesIO(_checked(content)), map_location="cpu", weights_only=True)
    except Exception as error:  # arbitrary bytes may raise anything
        why, *_ = str(error).splitlines() or [type(error).__name__]
        raise ConfigError(f"{file} is not a checkpoint: {why}") from None
    if not isinstance(state, dict):
        raise ConfigError(f"{file} is not a checkpoint: it contains {type(state).__name__}, not dict")
    # Exact types: True is no number of rounds.
    missing = sorted(key for key, kinds in KEYS.items() if type(state.get(key, ...)) not in kinds)
    if missing:
        raise ConfigError(f"{file} is not a checkpoint of a run: missing or invalid {', '.join(missing)}")
    return state


def _checked(content: bytes) -> bytes:
    """Returns the payload of a checkpoint file. Raises ValueError if the format or the checksum is wrong."""
    head, _, rest = content.partition(b"\n")
    if not head.startswith(MARK):
        raise ValueError("it does not begin with the header of an Esper checkpoint")
    if head != b"%s%d" % (MARK, FORMAT):
        written = head[len(MARK) :][:20].decode(errors="replace")
        raise ValueError(
            f"it has format {written}, but this version of Esper reads format {FORMAT}, with other entries of the env; "
            "start the run again, or continue it with the version that wrote it"
        )
    # The first line end ends the checksum; further ones are part of the payload.
    digest, _, saved = rest.partition(b"\n")
    if hashlib.sha256(saved).hexdigest().encode() != digest:
        raise ValueError("it is truncated or was modified: its SHA-256 differs from the one stored in it")
    return saved


def policy_state(policy: Policy) -> State:
    """Returns the state needed to act with this policy elsewhere."""
    return {
        **policy.policy_state(),
        "slots": list(policy.spec.slots),
        "blueprints": list(policy.spec.blueprints),
        "config": policy.config.model_dump(mode="json"),
    }
