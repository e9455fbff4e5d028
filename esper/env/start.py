"""Starts of hosts other than new weights: weights in a file, or their own training."""

from __future__ import annotations

import copy
import hashlib
import pickle
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from esper.config import ConfigError, TrainingConfig
from esper.config.task import NEW, TRAINED
from esper.data.facts import weights_file
from esper.data.task import Task
from esper.errors import MISFITS
from esper.files.grown_host import HostFiles, load_host
from esper.hosts.host import Host
from esper.training.rng import seeded


@dataclass(frozen=True)
class CopiesOf:
    """Makes copies of a network, as ``Task.build_host``."""

    network: Host

    def __call__(self) -> Host:
        return copy.deepcopy(self.network)


def started(task: Task, start: str) -> Task:
    """Returns the task with hosts that start as ``TaskConfig.start`` says.

    Raises ConfigError for a file that is missing or does not fit the task's host.
    """
    task = task.from_new_weights()
    if start == NEW:
        return task
    if start == TRAINED:
        return replace(task, origin=task.build_host, trained=True)
    file = weights_file(start)
    try:
        network = _network_in(file, task)
    except (*MISFITS, OSError, pickle.UnpicklingError, safetensors.SafetensorError) as error:
        raise ConfigError(f"task.start is {start}, which does not fit the host of {task.name}: {error}") from error
    return replace(task, build_host=CopiesOf(network), origin=task.build_host)


def recorded(config: TrainingConfig) -> TrainingConfig:
    """Returns the config with the checksum of the file that hosts start from, if it is one.

    Raises ConfigError if the config has another: a run is not resumed from other weights.
    """
    start = config.task.start
    known = config.task.start_sha256
    if start in (NEW, TRAINED):
        return config
    checksum = hashlib.sha256(weights_file(start).read_bytes()).hexdigest()
    if known not in (None, checksum):
        raise ConfigError(f"task.start is {start}, whose weights have changed: SHA-256 {checksum}, and {known} before")
    return config.with_values(task={"start_sha256": checksum})


def _network_in(file: Path, task: Task) -> Host:
    """Returns the host in ``file``. Raises an error of ``MISFITS`` or ConfigError if it does not fit."""
    with seeded(0):  # all weights are overwritten
        host = task.new_host()
    stem = file.with_suffix("")
    if file.suffix == ".safetensors" and HostFiles(stem).topology.is_file():
        grown = load_host(stem, host)
        return grown if grown.kept else grown.host
    # Lazy layers get their weights in a first pass.
    sample = task.sample
    if isinstance(sample, Tensor):
        sample = sample.cpu()
    host.probe(sample)
    host.load_state_dict(_read(file))
    return host


def _read(file: Path) -> dict[str, Tensor]:
    """Returns the state dict in ``file``; no code in it is executed."""
    if file.suffix == ".safetensors":
        return safetensors.torch.load_file(file)
    weights = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(weights, dict):
        raise TypeError(f"it holds a {type(weights).__name__}, not a state dict")
    return weights
