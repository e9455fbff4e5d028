"""Peak memory of a separate process that trains some hosts: ``python -m esper.bench.process_memory 4 128 8 cpu``."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from esper.bench.synthetic import growth_env, image_task
from esper.config import ConfigError
from esper.rollout.threads import one_thread
from esper.telemetry.memory import STATUS, resident

BATCHES = 4
_FORGET_PEAK = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Peak:
    """Peak memory of hosts in training, above the level before the first of them, in bytes."""

    resident: int
    device: int
    """Memory that torch reserved on the GPU; 0 on the CPU."""


def measure_here(envs: int, batch: int, width: int, device: torch.device) -> Peak:
    """Measures the training of ``envs`` hosts for two epochs in this process.

    One host is trained on tiny batches first, so that libraries and compiled kernels are loaded and do not count.
    """
    on_gpu = device.type != "cpu"
    task = image_task(BATCHES * batch, width, device, validation=batch)
    with one_thread(), growth_env(image_task(2, width, device, validation=2), 1, 2) as env:
        env.hosts.trainer.epoch(env.training)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    _FORGET_PEAK.write_text("5")
    before = resident("VmRSS")
    reserved = torch.cuda.memory_reserved() if on_gpu else 0
    with one_thread(), growth_env(task, envs, batch) as env:
        for _ in range(2):
            env.hosts.trainer.epoch(env.training)
        if on_gpu:
            torch.cuda.synchronize()
    peak = torch.cuda.max_memory_reserved() if on_gpu else 0
    return Peak(resident("VmHWM") - before, peak - reserved)


def measure_apart(envs: int, batch: int, width: int, device: torch.device) -> Peak:
    """Does the same in a new process.

    Raises:
        ConfigError: the system does not report the memory of a process.
        RuntimeError: the process failed.
    """
    if not STATUS.exists():
        raise ConfigError(f"measuring the memory of a process needs {STATUS}, which this system does not have")
    command = [sys.executable, "-m", "esper.bench.process_memory", str(envs), str(batch), str(width), str(device)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(f"measuring memory failed: {found.stderr.strip()}")
    return Peak(**json.loads(found.stdout.splitlines()[-1]))


if __name__ == "__main__":
    _, hosts, rows, channels, where = sys.argv
    print(json.dumps(asdict(measure_here(int(hosts), int(rows), int(channels), torch.device(where)))))
