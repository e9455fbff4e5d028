"""Cases of `train-epoch`: an epoch of many hosts, against the same hosts in PyTorch.

Once in the fastest of the ways that a careful user could write, which the bars are for, and once as a tutorial writes
it. Esper trains in one process, and in a process per core, as `esper run` does with small hosts.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

import torch

from esper.bench.case import BenchArgs, BenchCase, Size, Sizes
from esper.bench.fixtures import BLOCKS, CHANNELS, CLASSES, SIDE, growth_env, image_task, split
from esper.bench.plain import PlainTraining, plain_cnn
from esper.bench.process_memory import measure_in_a_process
from esper.bench.processes import Processes, shares
from esper.bench.profiling import device_idle
from esper.bench.tuned import Recipe, TunedTraining
from esper.rollout.threads import one_thread
from esper.training.execution.cores import usable_cores

NAME = "train-epoch"
SIZES = Sizes(
    "ENVSxBATCHxWIDTH",
    ((4, 128, 8), (1, 128, 8), (4, 32, 8), (4, 128, 32)),
    cuda=((8, 128, 8), (1, 128, 8), (8, 512, 32)),
    sweep=tuple((envs, batch, width) for width in (8, 32) for batch in (32, 128, 512) for envs in (1, 2, 4, 8)),
    seconds=240.0,
)

# Min ratios to the tuned baseline. On CUDA it replays a graph of each host side by side, as Esper does, so the bar is
# "not slower".
BARS: dict[tuple[str, Size], float] = {
    ("cpu", (4, 128, 8)): 2.5,
    ("cpu", (4, 32, 8)): 2.0,
    ("cpu", (4, 128, 32)): 2.0,
    ("cuda", (8, 128, 8)): 1.0,
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
    if quick:
        return batch
    wanted = FULL
    if device.type == "cpu" and (device.type, size) not in BARS:
        wanted = min(FULL, _SHORT * 8 // (envs * width))
    return max(_MIN_BATCHES, wanted // batch) * batch


def comparisons(args: BenchArgs) -> Iterator[BenchCase]:
    """Yields images per second at each size; unless sizes are given, also the memory that hosts need."""
    for device, size in SIZES.of(args):
        yield from _speed(size, device, args.quick)
    if args.sizes:
        return
    counts = MEMORY_ENVS[:2] if args.quick else MEMORY_ENVS
    for device in args.devices:
        yield from _memory(device, counts)


class EsperTraining:
    """Hosts of an env; close them at the end.

    Args:
        hosts: number of hosts.
        samples: number of training images.
        batch: samples in a step.
        width: channels of the first block.
        device: where hosts train.
        lanes: hosts that train at the same time; None: as many as there are cores.
    """

    def __init__(
        self,
        hosts: int,
        samples: int,
        batch: int,
        width: int,
        device: torch.device,
        lanes: int | None = None,
    ) -> None:
        task = image_task(samples, width, device, validation=batch)
        self._opened = ExitStack()
        self.env = self._opened.enter_context(growth_env(task, hosts, batch, lanes=lanes))

    def epoch(self) -> None:
        """Trains every host for an epoch."""
        with one_thread():
            self.env.local.trainer.epoch(self.env.training)

    def close(self) -> None:
        self._opened.close()


def _speed(size: Size, device: torch.device, quick: bool) -> Iterator[BenchCase]:
    envs, batch, width = size
    samples = samples_of(size, device, quick)
    build = partial(plain_cnn, CHANNELS, CLASSES, width, BLOCKS)
    data = split(samples, 0, device)
    bar = None
    if not quick:
        bar = BARS.get((device.type, size))
    plain = PlainTraining([build() for _ in range(envs)], data, batch)
    with (
        closing(TunedTraining(Recipe(build), envs, data, batch, compiles=not quick)) as tuned,
        closing(EsperTraining(envs, samples, batch, width, device)) as ours,
    ):
        label = f"E {envs}, batch {batch}, width {width}"
        against_tuned = BenchCase(
            case=NAME,
            size=f"{label}, {samples:,} samples of {SIDE} x {SIDE}",
            device=device,
            baseline=tuned.name,
            run=ours.epoch,
            run_baseline=tuned.epoch,
            bar=bar,
            unit="images/s",
            amount=envs * samples,
        )
        yield against_tuned
        yield replace(
            against_tuned,
            baseline=plain.name,
            run_baseline=plain.epoch,
            bar=None,
        )
        if device.type == "cpu" and envs > 1 and usable_cores() > 1:
            yield from _in_processes(against_tuned, size, samples)
        if device.type != "cpu":
            yield BenchCase(
                case=f"{NAME}: time the GPU is idle",
                size=label,
                device=device,
                baseline=f"a budget of {IDLE_BUDGET:g} %",
                run=partial(device_idle, ours.epoch),
                run_baseline=lambda: IDLE_BUDGET,
                bar=None if bar is None else 1.0,
                unit="%",
                turns=3,
            )


def _in_processes(against_tuned: BenchCase, size: Size, samples: int) -> Iterator[BenchCase]:
    """Yields the same with Esper's hosts in a process per core, each with one worker."""
    envs, batch, width = size
    make = partial(
        EsperTraining,
        samples=samples,
        batch=batch,
        width=width,
        device=against_tuned.device,
        lanes=1,
    )
    makers = [partial(make, count) for count in shares(envs, usable_cores())]
    with closing(Processes(makers)) as spread:
        yield replace(
            against_tuned,
            case=f"{NAME}: in {len(makers)} processes",
            run=spread.epoch,
        )


def _memory(device: torch.device, counts: tuple[int, ...]) -> Iterator[BenchCase]:
    """Yields the peak memory of E hosts in a separate process, against E times that of one host."""
    batch, width = MEMORY_AT
    peaks = {envs: measure_in_a_process(envs, batch, width, device) for envs in counts}
    for kind, one in peaks[1].items():
        for envs in counts:
            yield BenchCase(
                case=f"{NAME}: increase in {kind}",
                size=f"E {envs}, batch {batch}, width {width}",
                device=device,
                baseline=f"{envs} times that of one host",
                run=partial(float, peaks[envs][kind]),
                run_baseline=partial(float, envs * one),
                bar=_MEMORY_BAR if envs > 1 else None,
                unit="MB",
                turns=1,
            )
