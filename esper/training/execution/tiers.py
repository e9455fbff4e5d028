"""Execution tiers of training steps: eager, compiled, or captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from esper.config import ConfigError, RunConfig
from esper.training.execution.compiled import compile_hosts
from esper.training.execution.gpu import Gpu
from esper.training.execution.multi_gpu import MultiGpuExecutor
from esper.training.execution.streams import StreamExecutor
from esper.training.execution.workers import WorkerExecutor
from esper.training.executor import Execution, Executor
from esper.training.host_training import HostTraining


def make_executor(run: RunConfig, *devices: torch.device) -> Executor:
    """Makes the executor on ``devices`` for the tier that ``run`` requests; the caller closes it.

    Raises ConfigError for a tier that a device does not have.
    """
    if len(devices) > 1:
        return MultiGpuExecutor([make_executor(run, device) for device in devices])
    (device,) = devices
    if device.type == "cuda":
        return StreamExecutor(Gpu(device), captures=run.tier in ("auto", "graph"))
    if run.tier == "graph":
        raise ConfigError(
            f"run.tier graph captures CUDA graphs, and {device.type} has none; it can be auto, eager or compiled"
        )
    return WorkerExecutor(run.lanes)


def prepare_hosts(run: RunConfig, hosts: Sequence[HostTraining], executor: Executor) -> Execution:
    """Prepares ``hosts``, before their first episode, for the tier that ``run`` requests.

    Raises RuntimeError if they cannot be compiled and ``ESPER_REQUIRE_NATIVE`` is 1.
    """
    if run.tier == "compiled":
        refused = compile_hosts(hosts, executor)
        return Execution("compiled") if refused is None else Execution("eager", refused)
    return Execution("graph" if executor.captures else "eager")
