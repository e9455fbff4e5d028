"""A trained agent's policy as one portable file: weights as safetensors, everything else as JSON in its header.

Reading one executes no code. A file is rejected unless every tensor has the name, shape and bytes that were written.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import safetensors
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from esper.config import ConfigError, TrainingConfig
from esper.files.atomic import write_atomic
from esper.ppo.policy import Policy
from esper.spaces.action import ActionSpec
from esper.spaces.observation import ObservationLayout
from esper.telemetry.event import plain

FORMAT = 1
SUFFIX = ".safetensors"
HEADER = "esper_policy"
"""Key of the JSON text in the file's header."""

PARTS = ("network", "observations")


class Facts(BaseModel):
    """Metadata stored next to the weights."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: int
    blueprints: Annotated[list[str], Field(min_length=1)]
    """Blueprints in the order of the embedding rows."""
    config: dict[str, Any]
    """Config of the run that it learned in."""
    rounds: Annotated[int, Field(ge=0)]
    """Number of rounds that it learned from."""
    command: str
    """Command that reproduces it."""
    packages: dict[str, str]
    """Package versions that it was made with."""
    score: dict[str, Any] | None
    """Measured performance; None if it was not evaluated."""
    sha256: str
    """Checksum of all tensors, see :func:`digest`."""


@dataclass(frozen=True)
class PolicyFile:
    """The content of a policy file."""

    facts: Facts
    config: TrainingConfig
    policy: dict[str, Any]
    """The policy's state, in the form used by checkpoints."""


def write(
    file: Path,
    policy: Mapping[str, Any],
    config: TrainingConfig,
    rounds: int,
    packages: Mapping[str, str],
    score: Mapping[str, Any] | None = None,
) -> None:
    """Writes a policy's state, as stored in checkpoints, from a run with ``config``, without machine-specific values.

    Raises:
        OSError: the file cannot be written.
    """
    config = config.with_values(
        run={"device": "cpu", "lanes": None},
        task={"data": None, "download": False},
        ppo={"device": "cpu"},
    )
    tensors = flat_tensors(policy)
    facts = Facts(
        format=FORMAT,
        blueprints=list(policy["blueprints"]),
        config=config.model_dump(mode="json"),
        rounds=rounds,
        command=command_of(config),
        packages=dict(packages),
        score=None if score is None else plain(dict(score)),
        sha256=digest(tensors),
    )
    header = {HEADER: json.dumps(facts.model_dump(), allow_nan=False)}
    write_atomic(file, safetensors.torch.save(tensors, header))


def read(file: Path) -> PolicyFile:
    """Returns the content of a policy file.

    Raises:
        ConfigError: there is no such file, it was not made by :func:`write`, or this version of Esper cannot play it.
    """
    try:
        with safetensors.safe_open(file, framework="pt") as content:
            header = content.metadata() or {}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  not a dict
    except FileNotFoundError:
        raise ConfigError(f"no policy at {file}") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{file} is not a policy: {error}") from None
    if HEADER not in header:
        raise ConfigError(f"{file} is not a policy: its header has no entry {HEADER!r}")
    try:
        facts = _facts(header[HEADER])
        config = TrainingConfig.parse(facts.config)
        _check(tensors, facts, config)
    except ValueError as error:  # includes ConfigError
        raise ConfigError(f"{file} is not a usable policy: {error}") from None
    parts = {
        part: {name.removeprefix(f"{part}."): t for name, t in tensors.items() if name.startswith(f"{part}.")}
        for part in PARTS
    }
    policy = {**parts, "blueprints": facts.blueprints, "config": config.ppo.model_dump(mode="json")}
    return PolicyFile(facts, config, policy)


def _facts(text: str) -> Facts:
    """Parses the header. Raises ValueError with a one-line message."""
    found = json.loads(text)
    number = found.get("format") if isinstance(found, dict) else None
    if number != FORMAT:
        raise ValueError(f"it has format {number}, but this version of Esper reads format {FORMAT}")
    try:
        return Facts.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _check(tensors: Mapping[str, Tensor], facts: Facts, config: TrainingConfig) -> None:
    """Raises ValueError unless the tensors are those of such a network, and unchanged since they were written."""
    one_slot = ("r0c0",)  # no weight depends on the number of slots
    spec = ActionSpec(one_slot, tuple(facts.blueprints))
    wanted = flat_tensors(Policy(spec, ObservationLayout(one_slot, 1), 1, config.ppo).policy_state())
    for name in sorted(wanted.keys() | tensors.keys()):
        expected, actual = _form(wanted.get(name)), _form(tensors.get(name))
        if actual != expected:
            raise ValueError(f"tensor {name} is {actual}; expected {expected if name in wanted else 'no such tensor'}")
    if digest(tensors) != facts.sha256:
        raise ValueError("the weights do not match the checksum in its header")
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise ValueError(f"{', '.join(broken)} contain non-finite values")


def _form(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def flat_tensors(policy: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a policy's state by dotted name, on the CPU."""
    return {
        f"{part}.{name}": tensor.detach().cpu().contiguous() for part in PARTS for name, tensor in policy[part].items()
    }


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of names, dtypes, shapes and bytes, in the order of names."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {_form(tensor)}\n".encode())
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def command_of(config: TrainingConfig) -> str:
    """Returns the `esper run` command with this config, independent of later changes to the task's defaults."""
    values = config.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    return " ".join(["esper run", *(f"--set {shlex.quote(text)}" for text in _assignments(values))])


def _assignments(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Returns ``a.b=c`` for every value in nested tables."""
    found: list[str] = []
    for key, value in values.items():
        nested = isinstance(value, dict)
        found += _assignments(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}={json.dumps(value)}"]
    return found
