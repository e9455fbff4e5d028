"""Execution tiers of training steps: operator by operator, compiled, or captured once and replayed without Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from esper.config import ConfigError, RunConfig
from esper.training.execution.compiled import compile_hosts
from esper.training.execution.gpu import Gpu
from esper.training.execution.multi_gpu import AnyLanes, MultiGpuLanes, OneDevice, by_device
from esper.training.execution.streams import StreamLanes
from esper.training.execution.workers import WorkerLanes
from esper.training.host_training import HostTraining


@dataclass(frozen=True)
class Tier:
    """The tier of training steps, and why it is not the requested one."""

    name: str
    """eager, compiled or graph."""
    refused: str | None = None
    """Why it is not the tier that the config names; None if it is, or if the config says auto."""


def make_lanes(run: RunConfig, *devices: torch.device) -> AnyLanes:
    """Makes lanes on ``devices`` for the tier that ``run`` requests; the caller closes them.

    Raises ConfigError for a tier that a device does not have.
    """
    if len(devices) > 1:
        return MultiGpuLanes([_lanes_on(run, device) for device in devices])
    return _lanes_on(run, devices[0])


def _lanes_on(run: RunConfig, device: torch.device) -> OneDevice:
    if device.type == "cuda":
        return StreamLanes(Gpu(device), capture=run.tier in ("auto", "graph"))
    if run.tier == "graph":
        raise ConfigError(
            f"run.tier graph captures CUDA graphs, and {device.type} has none; it can be auto, eager or compiled"
        )
    return WorkerLanes(run.lanes)


def prepare_hosts(run: RunConfig, envs: Sequence[HostTraining], lanes: AnyLanes) -> Tier:
    """Prepares the hosts of ``envs``, before their first episode, for the tier that ``run`` requests.

    Raises RuntimeError if they cannot be compiled and ``ESPER_REQUIRE_NATIVE`` is 1.
    """
    shares = by_device(lanes, envs)
    if run.tier == "compiled":
        refused = [why for each, mine in shares if (why := compile_hosts(mine, each)) is not None]
        return Tier("eager", refused[0]) if refused else Tier("compiled")
    return Tier("graph" if all(isinstance(each, StreamLanes) and each.capture for each, _ in shares) else "eager")
