"""Execution tiers of training steps: eager, compiled, or captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from esper.config import ConfigError, RunConfig
from esper.training.execution.compiled import compile_hosts
from esper.training.execution.gpu import Gpu
from esper.training.execution.lanes import Lanes
from esper.training.execution.multi_gpu import MultiGpuLanes
from esper.training.execution.streams import StreamLanes
from esper.training.execution.workers import WorkerLanes
from esper.training.host_training import HostTraining


@dataclass(frozen=True)
class Tier:
    """The tier of training steps: eager, compiled or graph."""

    name: str
    refused: str | None = None
    """The reason that it is not the tier that the config names; None if it is, or if the config says auto."""


def make_lanes(run: RunConfig, *devices: torch.device) -> Lanes:
    """Makes lanes on ``devices`` for the tier that ``run`` requests; the caller closes them.

    Raises ConfigError for a tier that a device does not have.
    """
    if len(devices) > 1:
        return MultiGpuLanes([make_lanes(run, device) for device in devices])
    (device,) = devices
    if device.type == "cuda":
        return StreamLanes(Gpu(device), captures=run.tier in ("auto", "graph"))
    if run.tier == "graph":
        raise ConfigError(
            f"run.tier graph captures CUDA graphs, and {device.type} has none; it can be auto, eager or compiled"
        )
    return WorkerLanes(run.lanes)


def prepare_hosts(run: RunConfig, hosts: Sequence[HostTraining], lanes: Lanes) -> Tier:
    """Prepares ``hosts``, before their first episode, for the tier that ``run`` requests.

    Raises RuntimeError if they cannot be compiled and ``ESPER_REQUIRE_NATIVE`` is 1.
    """
    if run.tier == "compiled":
        refused = compile_hosts(hosts, lanes)
        return Tier("compiled") if refused is None else Tier("eager", refused)
    return Tier("graph" if lanes.captures else "eager")
