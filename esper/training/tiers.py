"""How steps of hosts are carried out: queued one by one by Python, or captured once and launched without it."""

from __future__ import annotations

import torch

from esper.config import ConfigError, RunConfig
from esper.training.gpu import Gpu
from esper.training.gpu_lanes import GpuLanes
from esper.training.lanes import Lanes


def make_lanes(run: RunConfig, device: torch.device) -> Lanes | GpuLanes:
    """Lanes on ``device`` for the tier that ``run`` asks for; the caller closes them.

    Raises ConfigError for a tier that the device does not have.
    """
    if device.type == "cuda":
        return GpuLanes(Gpu(device), capture=run.tier in ("auto", "graph"))
    if run.tier == "graph":
        raise ConfigError(f"run.tier graph captures CUDA graphs, and {device.type} has none; it can be auto or eager")
    return Lanes(run.lanes)
