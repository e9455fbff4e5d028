"""Trained agents: finding one by name, saving one as a single portable file, and making a controller of it.

A policy file has weights as safetensors and everything else as JSON in its header. Reading one executes no code. A file
is rejected unless every tensor has the name, shape and bytes that were written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import safetensors
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from esper.agents.ppo.policy import Policy
from esper.agents.spec import FORMS_OF_AGENTS, ControllerSpec, require_no_pipe
from esper.config import ConfigError, TrainingConfig, read_toml
from esper.core.action import ActionSpec
from esper.core.observation import ObservationLayout
from esper.data.names import DRAWN
from esper.env import varied
from esper.env.slot_env import SlotVectorEnv
from esper.errors import MISFITS
from esper.files import checkpoint
from esper.files.atomic import given_path, write_atomic
from esper.telemetry.text import plain

FORMAT = 6
SUFFIX = ".safetensors"
HEADER = "esper_policy"
"""Key of the JSON text in the file's header."""

PRETRAINED = Path(__file__).parent / "pretrained" / f"varied{SUFFIX}"
"""The agent that comes with Esper."""

PARTS = ("network", "observations")


class Facts(BaseModel):
    """Metadata stored next to the weights of a policy file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: int
    slots: list[str]
    blueprints: list[str]
    """Slots and blueprints of the hosts that it learned on."""
    config: dict[str, Any]
    """Config of the run that it learned in."""
    rounds: Annotated[int, Field(ge=0)]
    """Number of rounds that its run has played."""
    best_round: int | None = None
    """Number of rounds that the agent had learned from when it did best on validation hosts, as it is saved; None if it
    was not validated."""
    command: str
    """Command that reproduces it."""
    packages: dict[str, str]
    """Package versions that it was made with."""
    score: dict[str, Any] | None
    """Measured performance; None if it was not evaluated."""
    sha256: str
    """Checksum of all tensors, see :func:`digest`."""


@dataclass(frozen=True)
class SavedPolicy:
    """A trained agent's policy, read from a file."""

    name: str
    """The name it was requested by."""
    state: checkpoint.State
    slots: tuple[str, ...]
    blueprints: tuple[str, ...]
    """Slots and blueprints of the hosts that it learned on."""
    config: TrainingConfig | None
    """Config of its run; None for a checkpoint outside a run folder."""
    rounds: int
    """Number of rounds that its run has played."""
    best_round: int | None = None
    """The round after which it did best, as :attr:`Facts.best_round`."""
    folder: Path | None = None
    """Folder of its run; None if that is not at hand."""
    facts: Facts | None = None
    """Metadata of a policy file; None for a checkpoint."""

    @property
    def origin(self) -> str:
        """Describes where it learned; empty if that is unknown."""
        if self.config is None:
            return ""
        run = self.config.run
        if not run.learns:
            return f"played as {run.controller} on {self.config.task.name}"
        rounds = f"{self.rounds} of {run.rounds} rounds"
        if self.best_round:
            rounds += f", best after round {self.best_round}"
        return f"learned on {self.config.task.name}, {rounds}, seed {run.seed}"

    def unlike(self, config: TrainingConfig, spec: ActionSpec) -> str:
        """Returns a sentence on the settings of the env it learned in that are others in ``config`` and ``spec``.

        They are those of an env that it is to play. "" if all are alike, or if it is unknown where it learned.
        """
        if self.config is None:
            return ""
        learned = self.config
        if learned.task.name in DRAWN:
            learned = varied.resolve(learned)
        others = []
        for name in ("edits_per_epoch", "at_once"):
            before, now = getattr(learned.env, name), getattr(config.env, name)
            if None not in (before, now) and before != now:
                others.append(f"env.{name}={str(before).lower()}, which is {str(now).lower()} here")
        foreign = set(spec.blueprints) - set(self.blueprints)
        if foreign:
            others.append(f"the blueprints {', '.join(self.blueprints)}, and with none of {', '.join(sorted(foreign))}")
        if not others:
            return ""
        return f"This agent {self.origin}, with {'; with '.join(others)}."

    def controller(self, env: SlotVectorEnv, run_seed: int, greedy: bool = True) -> Policy:
        """Returns the policy for the envs of ``env``.

        The hosts may have other slots and other blueprints than those it learned on. Raises ConfigError if it has
        another network.
        """
        try:
            ppo = self.state["config"]
            config = TrainingConfig.parse({"ppo": ppo, "reward": {"gamma": ppo["gamma"]}}).ppo
            policy = Policy(env.action_spec, env.layout, env.num_envs, config, run_seed, greedy=greedy)
            policy.load_policy_state(self.state)
        except RuntimeError as error:
            raise ConfigError(f"{self.name} was trained with a different network or observation: {error}") from None
        except MISFITS as error:
            raise ConfigError(f"{self.name} contains no policy that this version of Esper can read: {error}") from None
        return policy

    def provenance(self) -> tuple[TrainingConfig, dict[str, str]]:
        """Returns the config of the run in which it learned and the package versions used there.

        Raises ConfigError if it was loaded neither from that run nor from a policy file, or if the versions cannot be
        read.
        """
        if self.config is not None and self.facts is not None:
            return self.config, self.facts.packages
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
    spec = ControllerSpec.of(name)
    if spec.name == "pretrained":
        return PRETRAINED
    return Path(os.path.expanduser((spec.kind == "checkpoint" and spec.path) or name))


def find_policy(name: str) -> SavedPolicy:
    """Reads the trained agent called ``name``: a run folder, its checkpoint, a policy file, or ``pretrained``.

    A path may be prefixed with ``checkpoint:``. Raises ConfigError if nothing is there, if it is not a policy, or if
    the run's controller has none.
    """
    path = policy_path(name)
    if path.suffix == SUFFIX and not path.is_dir():
        return _read(path, name)
    if not path.exists():
        raise ConfigError(f"no checkpoint at {path}; {FORMS_OF_AGENTS}")
    state = checkpoint.read(path)
    folder = path
    if not path.is_dir():
        folder = path.parent
    config = None
    home = None
    if path in (folder, folder / checkpoint.NAME):
        config = _config_of(folder)
        if config is not None:
            home = folder
    if state["policy"] is None:
        controller = "its controller"
        if config:
            controller += f" {config.run.controller}"
        raise ConfigError(
            f"{name} contains no policy: {controller} does not learn; {FORMS_OF_AGENTS}. `esper compare` plays "
            "controllers that have no policy, for example with --arm heuristic --arm none"
        )
    return SavedPolicy(
        name,
        state["policy"],
        tuple(state["policy"]["slots"]),
        tuple(state["policy"]["blueprints"]),
        config,
        int(state["round"]),
        state["agent"].get("best_round") or None,
        folder=home,
    )


def _config_of(folder: Path) -> TrainingConfig | None:
    """Reads a run's config, if there is one; an error names the file, because the user did not type its values."""
    file = folder / checkpoint.CONFIG
    if not file.is_file():
        return None
    tables = read_toml(file)
    try:
        return TrainingConfig.parse(tables)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def save_policy(
    run: SavedPolicy | Path | str,
    file: Path | str,
    score: Mapping[str, Any] | None = None,
) -> None:
    """Saves what the agent of a run has learned to ``file`` (FILE.safetensors), for ``--controller checkpoint:FILE``.

    Machine-specific values of the run's config are left out.

    Args:
        run: folder of a ppo run, or the checkpoint in it.
        score: measured performance, ready for JSON; stored in the file.

    Raises:
        ConfigError: there is no such run, its controller did not learn in it, or ``file`` is not a valid target.
        OSError: the file cannot be written.
    """
    target = check_target(file)
    policy = run
    if not isinstance(policy, SavedPolicy):
        policy = find_policy(str(policy))
    config, packages = policy.provenance()
    # The agent has nothing to do with the machine that it was trained on.
    config = config.with_values(
        run={"device": "cpu", "lanes": None},
        task={"data": None, "download": False},
        ppo={"device": "cpu"},
    )
    measured: dict[str, Any] | None = None
    if score is not None:
        measured = plain(dict(score))
    tensors = _flat_tensors(policy.state)
    facts = Facts(
        format=FORMAT,
        slots=list(policy.slots),
        blueprints=list(policy.blueprints),
        config=config.model_dump(mode="json"),
        rounds=policy.rounds,
        best_round=policy.best_round,
        command=command_of(config),
        packages=packages,
        score=measured,
        sha256=digest(tensors),
    )
    header = {HEADER: json.dumps(facts.model_dump(), allow_nan=False)}
    write_atomic(target, safetensors.torch.save(tensors, header))


def check_target(file: Path | str) -> Path:
    """Returns the path of a new policy file. Raises ConfigError if it exists, has another suffix, or has no folder."""
    target = given_path(file)
    if target.suffix != SUFFIX or target.exists() or not target.absolute().parent.is_dir():
        raise ConfigError(f"{target}: give a new file, NAME{SUFFIX}, in an existing folder")
    return target


def _read(file: Path, name: str) -> SavedPolicy:
    """Reads a policy file. Raises ConfigError if :func:`save_policy` did not make it, or if it cannot be played."""
    require_no_pipe(file, "policy")
    try:
        with safetensors.safe_open(file, framework="pt") as content:
            header = content.metadata() or {}
            tensors = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118  not a dict
    except FileNotFoundError:
        raise ConfigError(f"no policy at {file}") from None
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{file} is not a policy: {error}") from None
    if HEADER not in header:
        raise ConfigError(f"{file} is not a policy: its header has no entry {HEADER!r}")
    try:
        values = json.loads(header[HEADER])
        number = values.get("format") if isinstance(values, dict) else None
        if number != FORMAT:
            raise ValueError(
                f"it has format {number}, but this version of Esper reads format {FORMAT}, whose agents see other "
                "entries of the env; train the agent again with `esper run`"
            )
        facts = Facts.model_validate(values)
        config = TrainingConfig.parse(facts.config)
        _check_tensors(tensors, facts, config)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{file} is not a usable policy: {where}: {first['msg']}") from None
    except ValueError as error:  # includes ConfigError
        raise ConfigError(f"{file} is not a usable policy: {error}") from None
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
    for key, tensor in tensors.items():
        # Names were checked: each begins with its part.
        part, _, rest = key.partition(".")
        parts[part][rest] = tensor
    state = {**parts, "config": config.ppo.model_dump(mode="json")}
    return SavedPolicy(
        name,
        state,
        tuple(facts.slots),
        tuple(facts.blueprints),
        config,
        facts.rounds,
        facts.best_round,
        facts=facts,
    )


def _check_tensors(tensors: Mapping[str, Tensor], facts: Facts, config: TrainingConfig) -> None:
    """Raises ValueError unless the tensors are those of such a network, and unchanged since they were written."""
    spec = ActionSpec(tuple(facts.slots), tuple(facts.blueprints))
    layout = ObservationLayout(spec.slots, spec.blueprints, 1)
    wanted = _flat_tensors(Policy(spec, layout, 1, config.ppo).policy_state())
    for name in sorted(wanted.keys() | tensors.keys()):
        actual = _describe(tensors.get(name))
        expected = _describe(wanted.get(name))
        if actual != expected:
            if name not in wanted:
                expected = "no such tensor"
            raise ValueError(f"tensor {name} is {actual}; expected {expected}")
    if digest(tensors) != facts.sha256:
        raise ValueError("the weights do not match the checksum in its header")
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise ValueError(f"{', '.join(broken)} contain non-finite values")


def _describe(tensor: Tensor | None) -> str:
    if tensor is None:
        return "missing"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)}"


def _flat_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the tensors of a policy's state by dotted name, on the CPU."""
    tensors = {}
    for part in PARTS:
        for name, tensor in state[part].items():
            tensors[f"{part}.{name}"] = tensor.detach().cpu().contiguous()
    return tensors


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of names, dtypes, shapes and bytes, in the order of names."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {_describe(tensor)}\n".encode())
        sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()


def command_of(config: TrainingConfig) -> str:
    """Returns the `esper run` command with this config, independent of later changes to the task's defaults."""

    values = config.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    return " ".join(["esper run", *_assignments(values)])


def _assignments(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the option for every value in nested tables."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _assignments(value, f"{name}.")
        else:
            assignment = shlex.quote(f"{name}={json.dumps(value)}")
            yield f"--set {assignment}"
