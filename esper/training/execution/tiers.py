"""Execution tiers of training steps: eager, native, compiled, or captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from esper.config import ConfigError, RunConfig
from esper.ops import _native
from esper.training.execution.compiled import compile_hosts
from esper.training.execution.gpu import Gpu
from esper.training.execution.multi_gpu import MultiGpuExecutor
from esper.training.execution.streams import StreamExecutor
from esper.training.execution.workers import WorkerExecutor
from esper.training.executor import Execution, Executor
from esper.training.host_training import HostTraining
from esper.training.native import MOST_FLOPS, NativePasses


def make_executor(run: RunConfig, *devices: torch.device) -> Executor:
    """Makes the executor on ``devices`` for the tier that ``run`` requests; the caller closes it.

    Raises ConfigError for a tier that a device does not have.
    """
    if len(devices) > 1:
        return MultiGpuExecutor([make_executor(run, device) for device in devices])
    (device,) = devices
    if device.type == "cuda":
        if run.tier == "native":
            raise ConfigError(
                "run.tier native is compiled code for the CPU; on cuda it can be auto, graph, eager or compiled"
            )
        return StreamExecutor(Gpu(device), captures=run.tier in ("auto", "graph"))
    if run.tier == "graph":
        raise ConfigError(
            f"run.tier graph captures CUDA graphs, and {device.type} has none; it can be auto, native, eager or "
            "compiled"
        )
    return WorkerExecutor(run.lanes, run.tier in ("auto", "native"), _most_flops(run))


def prepare_hosts(run: RunConfig, hosts: Sequence[HostTraining], executor: Executor) -> Execution:
    """Prepares ``hosts``, before their first episode, for the tier that ``run`` requests.

    Raises RuntimeError if they cannot be compiled, or have no native passes though ``run`` names them, and
    ``ESPER_REQUIRE_NATIVE`` is 1.
    """
    if run.tier == "compiled":
        refused = compile_hosts(hosts, executor)
        return Execution("compiled") if refused is None else Execution("eager", refused)
    if run.tier in ("auto", "native") and hosts and hosts[0].device.type == "cpu":
        # All hosts are of one task.
        obstacle = NativePasses(hosts[0], most_flops=_most_flops(run)).obstacle()
        if obstacle is None:
            return Execution("native")
        if run.tier == "native":
            _native.refuse_fallback("hosts are trained by PyTorch", obstacle)
        return Execution("eager", obstacle)
    return Execution("graph" if executor.captures else "eager")


def _most_flops(run: RunConfig) -> float | None:
    return None if run.tier == "native" else MOST_FLOPS
