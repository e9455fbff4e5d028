"""Cases of `train-epoch`: an epoch of many hosts, against the same hosts one after another in plain eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import mul

import torch

from esper.bench.idle import device_idle
from esper.bench.plain import PlainTraining, plain_cnn
from esper.bench.process_memory import Peak, measure_apart
from esper.bench.request import BenchArgs, Size, SizeForm
from esper.bench.runner import BenchCase
from esper.bench.synthetic import BLOCKS, CHANNELS, CLASSES, SIDE, growth_env, image_task, split
from esper.rollout.threads import one_thread

NAME = "train-epoch"
SIZE = SizeForm(("envs", "batch", "width"), "4x128x8")

SWEEP = tuple((envs, batch, width) for width in (8, 32) for batch in (32, 128, 512) for envs in (1, 2, 4, 8))
DEFAULT_SIZES: dict[str, tuple[Size, ...]] = {
    "cpu": ((4, 128, 8), (1, 128, 8), (4, 32, 8), (4, 128, 32)),
    "cuda": ((8, 128, 8), (1, 128, 8), (8, 512, 32)),
}

# Min ratios. On CUDA, batches of 512 at width 32 fill the GPU, so the bar is "not slower".
BARS: dict[tuple[str, Size], float] = {
    ("cpu", (4, 128, 8)): 3.0,
    ("cuda", (8, 128, 8)): 5.0,
    **{("cuda", (envs, 512, 32)): 1.0 for envs in (1, 2, 4, 8)},
}
FULL = 5120  # samples per epoch and env, in rows with a bar and on CUDA
_SHORT = 5000  # samples of all envs together in other rows on the CPU, at width 8
_MIN_BATCHES = 2

IDLE_BUDGET = 10.0  # % of an epoch on CUDA

MEMORY_ENVS = (1, 2, 4, 8)
MEMORY_AT = (128, 8)  # batch, width
_MEMORY_BAR = 0.9  # of linear growth; a tenth is left for the allocator's rounding


def samples_of(size: Size, device: torch.device, quick: bool) -> int:
    """Returns the samples per epoch and env: full batches, few enough that a row on a CPU takes about ten seconds."""
    envs, batch, width = size
    wanted = FULL if (device.type, size) in BARS or device.type != "cpu" else min(FULL, _SHORT * 8 // (envs * width))
    return max(1 if quick else _MIN_BATCHES, 0 if quick else wanted // batch) * batch


def comparisons(request: BenchArgs) -> Iterator[BenchCase]:
    """Yields images per second at each size; unless sizes are given, also the memory that hosts need."""
    for device in request.devices:
        sizes = request.sizes or (SWEEP if request.sweep else DEFAULT_SIZES[device.type])
        for size in sizes:
            yield from _speed(size, device, request)
        if not request.sizes:
            yield from _memory(device, MEMORY_ENVS[:2] if request.quick else MEMORY_ENVS)


def _speed(size: Size, device: torch.device, request: BenchArgs) -> Iterator[BenchCase]:
    envs, batch, width = size
    samples = samples_of(size, device, request.quick)
    data = split(samples, request.seed, device)
    hosts = [plain_cnn(CHANNELS, CLASSES, width, BLOCKS) for _ in range(envs)]
    plain = PlainTraining(hosts, data.inputs(0, len(data)).contiguous(), data.y, batch)
    with growth_env(image_task(samples, width, device, validation=batch), envs, batch) as env:

        def ours() -> None:
            with one_thread():
                env.hosts.trainer.epoch(env.training)

        yield BenchCase(
            NAME,
            f"E {envs}, batch {batch}, width {width}, {samples:,} samples of {SIDE} x {SIDE}",
            device,
            str(plain),
            ours,
            plain.epoch,
            None if request.quick else BARS.get((device.type, size)),
            unit="images/s",
            amount=envs * samples,
        )
        if device.type != "cpu":
            yield BenchCase(
                f"{NAME}: time the GPU is idle",
                f"E {envs}, batch {batch}, width {width}",
                device,
                f"a budget of {IDLE_BUDGET:g} %",
                partial(device_idle, ours),
                lambda: IDLE_BUDGET,
                1.0 if (device.type, size) in BARS and not request.quick else None,
                unit="%",
                turns=3,
            )


def _memory(device: torch.device, counts: tuple[int, ...]) -> Iterator[BenchCase]:
    """Yields the peak memory of E hosts in a separate process, against E times that of one host."""
    batch, width = MEMORY_AT
    peaks = {envs: measure_apart(envs, batch, width, device) for envs in sorted({1, *counts})}
    kinds: dict[str, Callable[[Peak], int]] = {"peak RSS": lambda peak: peak.resident}
    if device.type != "cpu":
        kinds["peak device memory"] = lambda peak: peak.device
    for title, kind in kinds.items():
        megabytes = {envs: kind(peak) / 1e6 for envs, peak in peaks.items()}
        for envs in counts:
            yield BenchCase(
                f"{NAME}: increase in {title}",
                f"E {envs}, batch {batch}, width {width}",
                device,
                f"{envs} times that of one host",
                partial(megabytes.__getitem__, envs),
                partial(mul, envs, megabytes[1]),
                _MEMORY_BAR if envs > 1 else None,
                unit="MB",
                turns=1,
            )
