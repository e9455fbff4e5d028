"""Peak memory of hosts in training, measured in a separate process."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from esper.bench.fixtures import growth_env, image_task
from esper.config import ConfigError
from esper.data.task import Task
from esper.rollout.threads import one_thread
from esper.telemetry.memory import STATUS, resident

BATCHES = 4
_FORGET_PEAK = Path("/proc/self/clear_refs")


def measure_in_a_process(
    envs: int,
    batch: int,
    width: int,
    device: torch.device,
) -> dict[str, float]:
    """Trains ``envs`` hosts for two epochs in a new process.

    Returns:
        The ``peak RSS`` and, on a GPU, the ``peak device memory`` reserved by torch, above the level before the first
        of the hosts, in MB.

    Raises:
        ConfigError: the system does not report the memory of a process.
        RuntimeError: the process failed.
    """
    if not STATUS.exists():
        raise ConfigError(f"measuring the memory of a process needs {STATUS}, which this system does not have")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(_measure_here, envs, batch, width, device).result()
        except Exception as error:
            raise RuntimeError(f"measuring memory failed: {error}") from error


def _measure_here(
    envs: int,
    batch: int,
    width: int,
    device: torch.device,
) -> dict[str, float]:
    task = image_task(BATCHES * batch, width, device, validation=batch)
    _train(image_task(2, width, device, validation=2), 1, 2)  # loads libraries and kernels, which do not count
    on_gpu = device.type != "cpu"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    _FORGET_PEAK.write_text("5")
    before = resident("VmRSS")
    reserved = torch.cuda.memory_reserved() if on_gpu else 0
    _train(task, envs, batch)
    peaks = {"peak RSS": (resident("VmHWM") - before) / 1e6}
    if on_gpu:
        peaks["peak device memory"] = (torch.cuda.max_memory_reserved() - reserved) / 1e6
    return peaks


def _train(task: Task, envs: int, batch: int) -> None:
    with one_thread(), growth_env(task, envs, batch) as env:
        for _ in range(2):
            env.local.trainer.epoch(env.training)
        if task.device.type != "cpu":
            torch.cuda.synchronize()
