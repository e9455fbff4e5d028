"""What an agent has learned as one file to keep and to pass on: weights as safetensors, all else as JSON in its header.

Reading one runs no code. It is refused unless every tensor has the name, shape and bytes that it was written with.
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
"""Key of the JSON in the header of the file."""

PRETRAINED = Path(__file__).parent / "pretrained" / "digits.safetensors"
"""The controller that ships."""

PARTS = ("network", "observations")


class Facts(BaseModel):
    """What the file says beside its weights."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: int
    blueprints: Annotated[list[str], Field(min_length=1)]
    """What the rows of its embeddings stand for."""
    config: dict[str, Any]
    """Of the run that it learned in."""
    rounds: Annotated[int, Field(ge=0)]
    """That it learned from."""
    command: str
    """What makes it again."""
    packages: dict[str, str]
    """Versions that it was made with."""
    score: dict[str, Any] | None
    """What it was measured to be worth."""
    sha256: str
    """Of all tensors, see :func:`digest`."""


@dataclass(frozen=True)
class PolicyFile:
    """The content of a file."""

    facts: Facts
    config: TrainingConfig
    policy: dict[str, Any]
    """As a checkpoint holds it."""


def write(
    file: Path,
    policy: Mapping[str, Any],
    config: TrainingConfig,
    rounds: int,
    packages: Mapping[str, str],
    score: Mapping[str, Any] | None = None,
) -> None:
    """Write the policy of a checkpoint that learned in a run of ``config``; what is of that machine is left out.

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
    """The content of a file.

    Raises:
        ConfigError: no such file, or not one that :func:`write` made and this Esper can play; says why.
    """
    try:
        with safetensors.safe_open(file, framework="pt") as content:
            header = content.metadata() or {}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  it is no dict
    except FileNotFoundError:
        raise ConfigError(f"no policy at {file}") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{file} is not a policy: {error}") from None
    if HEADER not in header:
        raise ConfigError(f"{file} is not a policy: something else was saved in it")
    try:
        facts = _facts(header[HEADER])
        config = TrainingConfig.parse(facts.config)
        _check(tensors, facts, config)
    except ValueError as error:  # ConfigErrors, too
        raise ConfigError(f"{file} is not a policy that can be played: {error}") from None
    parts = {
        part: {name.removeprefix(f"{part}."): t for name, t in tensors.items() if name.startswith(f"{part}.")}
        for part in PARTS
    }
    policy = {**parts, "blueprints": facts.blueprints, "config": config.ppo.model_dump(mode="json")}
    return PolicyFile(facts, config, policy)


def _facts(text: str) -> Facts:
    """Raises ValueError in one line."""
    found = json.loads(text)
    number = found.get("format") if isinstance(found, dict) else None
    if number != FORMAT:
        raise ValueError(f"it has format {number}; this Esper reads format {FORMAT}")
    try:
        return Facts.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _check(tensors: Mapping[str, Tensor], facts: Facts, config: TrainingConfig) -> None:
    """Raises ValueError unless these are the tensors that such a network has, as they were written."""
    one_slot = ("r0c0",)  # no weight depends on the number of slots
    spec = ActionSpec(one_slot, tuple(facts.blueprints))
    wanted = flat_tensors(Policy(spec, ObservationLayout(one_slot, 1), 1, config.ppo).policy_state())
    for name in sorted(wanted.keys() | tensors.keys()):
        here, there = _form(wanted.get(name)), _form(tensors.get(name))
        if here != there:
            raise ValueError(f"{name} is {there}; a network of this Esper has {here}")
    if digest(tensors) != facts.sha256:
        raise ValueError("the weights are not those that it was written with")
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise ValueError(f"not all numbers of {', '.join(broken)} are finite")


def _form(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def flat_tensors(policy: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a policy's state by dotted names, on the CPU."""
    return {
        f"{part}.{name}": tensor.detach().cpu().contiguous() for part in PARTS for name, tensor in policy[part].items()
    }


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes, in order of names."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {_form(tensor)}\n".encode())
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def command_of(config: TrainingConfig) -> str:
    """The `esper run` that has this config, whatever the defaults of its task may become."""
    ours, default = (c.model_dump(mode="json", exclude_none=True) for c in (config, TrainingConfig()))
    return " ".join(["esper run", *(f"--set {shlex.quote(text)}" for text in _differing(ours, default))])


def _differing(ours: Mapping[str, Any], default: Mapping[str, Any], prefix: str = "") -> list[str]:
    """``a.b=c`` for every value that is not the default's."""
    found: list[str] = []
    for key, value in ours.items():
        if isinstance(value, dict):
            found += _differing(value, default[key], f"{prefix}{key}.")
        elif value != default.get(key):
            found.append(f"{prefix}{key}={json.dumps(value)}")
    return found
