"""Tuned baseline of the cases about training: the fastest way in which a careful user trains hosts in PyTorch.

The ways are tried here, on the hosts and the data of the case: float32 or bfloat16, images in NCHW or channels_last,
eager or compiled; on a CPU, several threads in one process or one-thread processes that share the hosts; on a GPU, each
step launched by Python or replayed from a CUDA graph. None waits for a number after each batch, as the plain baseline
does.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.benchmark import set_torch_threads

from esper.bench.case import dtype_name
from esper.bench.plain import DECAY, LR, MOMENTUM, candidates
from esper.bench.processes import Processes, Training, shares
from esper.config import Optimizer
from esper.data.split import Split
from esper.training.execution.cores import usable_cores

TRIED_STEPS = 6
"""Steps by which a way is timed."""
TURNS = 3
"""Number of times that they are timed; the best time counts."""
TRIED_STEPS_ON_A_GPU = 40
WARM_UP_STEPS = 3
"""Steps before a CUDA graph is captured, in which libraries choose their algorithms and optimizers make their state."""


@dataclass(frozen=True)
class Recipe:
    """The hosts that are trained, and all about it that is not a way to do it."""

    build: Callable[[], nn.Module]
    """Makes a host; processes import it by its name."""
    optimizer: Optimizer = "sgd"
    precisions: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    """Those that are tried."""

    def optimizer_of(self, host: nn.Module, captured: bool = False) -> torch.optim.Optimizer:
        """Returns the optimizer of a host; ``captured`` if a CUDA graph will hold its step."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(
                host.parameters(),
                LR,
                weight_decay=DECAY,
                fused=True,
                capturable=captured,
            )
        return torch.optim.SGD(
            host.parameters(),
            LR,
            MOMENTUM,
            weight_decay=DECAY,
            fused=True,
        )


@dataclass(frozen=True)
class Work:
    """Hosts, and the data that they are trained on, in batches."""

    recipe: Recipe
    hosts: int
    x: Tensor
    """Inputs [N, ...]."""
    y: Tensor
    """Their classes, int64 [N] or [N, T]."""
    batch: int

    @property
    def steps(self) -> int:
        """Number of full batches of an epoch."""
        return len(self.y) // self.batch


@dataclass(frozen=True)
class Way:
    """One way to train hosts."""

    precision: torch.dtype = torch.float32
    channels_last: bool = False
    compiled: bool = False
    captured: bool = False
    """Whether a step is a CUDA graph, of each host on a stream of its own."""
    processes: int = 1
    threads: int = 1

    @property
    def name(self) -> str:
        layout = "channels_last" if self.channels_last else "NCHW"
        how = "compiled" if self.compiled else "eager"
        model = f"{dtype_name(self.precision)} {layout}, {how}"
        if self.captured:
            return f"{model}, a CUDA graph of each host on its own stream"
        place = "one process" if self.processes == 1 else f"{self.processes} processes"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{model}, {place} of {threads}"


class Loop:
    """Hosts of one process, trained one after another."""

    def __init__(self, way: Way, work: Work) -> None:
        recipe = work.recipe
        layout = torch.channels_last if way.channels_last else torch.contiguous_format
        self.way = way
        self.batch = work.batch
        self.steps = work.steps
        self.x = work.x.contiguous(memory_format=layout)
        self.y = work.y
        on_device = [recipe.build().to(self.x.device).train() for _ in range(work.hosts)]
        self.hosts = [host.to(memory_format=layout) for host in on_device]  # type: ignore[call-overload]
        self.forward = self.hosts
        if way.compiled:
            self.forward = [torch.compile(host) for host in self.hosts]
        self.optimizers = [recipe.optimizer_of(host, way.captured) for host in self.hosts]
        self.graphs: list[StepGraph] = []
        if way.captured:
            for number in range(work.hosts):
                step = partial(self.step, number)
                self.graphs.append(StepGraph(step, self.steps, self.batch, self.x.device))

    def epoch(self) -> float:
        """Trains every host once on all full batches; returns the mean loss."""
        if self.graphs:
            orders = [self.order(self.steps) for _ in self.graphs]
            losses = replay(self.graphs, orders)
        else:
            losses = [self.train(number, self.steps) for number in range(len(self.hosts))]
        return float(torch.stack(losses).mean())

    def close(self) -> None:
        """Does nothing: it has no processes to end."""

    def train(self, number: int, steps: int) -> Tensor:
        """Trains one host on random batches; returns its mean loss, a scalar on the device."""
        if self.graphs:
            return replay([self.graphs[number]], [self.order(steps)])[0]
        with set_torch_threads(self.way.threads):
            total = torch.zeros((), device=self.x.device)
            for rows in self.order(steps):
                total += self.step(number, rows)
        return total / steps

    def order(self, steps: int) -> Tensor:
        """Returns random rows of the data, int64 [steps, batch]."""
        order = torch.randperm(len(self.y), device=self.x.device)
        return order[: steps * self.batch].view(steps, self.batch)

    def step(self, number: int, rows: Tensor) -> Tensor:
        """Trains one host on one batch; returns its loss, a scalar on the device."""
        model = self.forward[number]
        optimizer = self.optimizers[number]
        mixed = self.way.precision != torch.float32
        optimizer.zero_grad()
        with torch.autocast(self.x.device.type, self.way.precision, enabled=mixed):
            loss = F.cross_entropy(model(self.x[rows]).flatten(0, -2), self.y[rows].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()


class StepGraph:
    """A training step as a CUDA graph on a stream of its own; each replay takes the next row of ``order``.

    Args:
        step: trains on rows of the data, int64 [batch], and returns the loss.
        steps, batch: shape of ``order``.
        device: a GPU.
    """

    def __init__(
        self,
        step: Callable[[Tensor], Tensor],
        steps: int,
        batch: int,
        device: torch.device,
    ) -> None:
        self.order = torch.arange(batch, device=device).repeat(steps, 1)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.total = torch.zeros((), device=device)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            for _ in range(WARM_UP_STEPS):
                step(self.order[0])
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            rows = self.order.index_select(0, self.position)[0]
            self.total += step(rows)
            self.position += 1


def replay(graphs: Sequence[StepGraph], orders: Sequence[Tensor]) -> list[Tensor]:
    """Replays each graph for each row of its order, the graphs side by side; returns their mean losses."""
    steps = len(orders[0])
    current = torch.cuda.current_stream()
    for graph, order in zip(graphs, orders, strict=True):
        graph.order[:steps].copy_(order)
        graph.position.zero_()
        graph.total.zero_()
        graph.stream.wait_stream(current)
    for _ in range(steps):
        for graph in graphs:
            with torch.cuda.stream(graph.stream):
                graph.graph.replay()
    for graph in graphs:
        current.wait_stream(graph.stream)
    return [graph.total / steps for graph in graphs]


def workers(way: Way, work: Work) -> Processes:
    """Spreads the hosts over the processes of ``way``, each a :class:`Loop` of its own."""
    alone = replace(way, processes=1)
    work.x.share_memory_()  # type: ignore[no-untyped-call]
    work.y.share_memory_()  # type: ignore[no-untyped-call]
    parts = [replace(work, hosts=count) for count in shares(work.hosts, way.processes)]
    return Processes([partial(Loop, alone, part) for part in parts], way.threads)


class TunedTraining:
    """Hosts trained in the fastest of the tried ways; close it at the end.

    Args:
        recipe: how hosts are made and stepped; its function is a module-level one or a ``partial`` of one.
        hosts: number of hosts.
        data: inputs and their classes.
        batch: samples in a step.
        compiles: whether compiled hosts are tried, which takes half a minute or more.
    """

    def __init__(
        self,
        recipe: Recipe,
        hosts: int,
        data: Split,
        batch: int,
        compiles: bool = True,
    ) -> None:
        work = Work(recipe, hosts, data.inputs(0, len(data)).contiguous(), data.y, batch)
        self.tried: dict[Way, float] = {}
        """Seconds of the same work in each way that was tried."""

        # Compilation and processes are slow to start, so they are tried with the best of the rest only.
        seconds_of_one = partial(_seconds_of_one, work)
        best = self._fastest(_ways_of_one(work), seconds_of_one)
        if compiles:
            best = self._fastest([best, replace(best, compiled=True)], seconds_of_one)
        spread = _spread(best, work)
        if len(spread) > 1:
            best = self._fastest(spread, partial(_seconds_of_all, work))

        self.way = best
        self.name = f"tuned PyTorch: {self.way.name}"
        self._hosts = _start(self.way, work)

    def epoch(self) -> object:
        """Trains every host once on all full batches."""
        return self._hosts.epoch()

    def close(self) -> None:
        self._hosts.close()

    def _fastest(self, ways: Sequence[Way], seconds: Callable[[Way], float]) -> Way:
        times = {way: seconds(way) for way in ways}
        self.tried |= times
        return min(times, key=times.__getitem__)


def _ways_of_one(work: Work) -> list[Way]:
    """Returns the ways to train one host in this process, eagerly."""
    layouts = (False, True) if work.x.dim() == 4 else (False,)
    captured = (False, True) if work.x.device.type == "cuda" else (False,)
    kinds = itertools.product(work.recipe.precisions, layouts, captured)
    return [Way(precision, layout, captured=graph) for precision, layout, graph in kinds]


def _spread(way: Way, work: Work) -> list[Way]:
    """Returns the same way with each number of threads, and with a process per core; on a GPU, only itself."""
    cores = usable_cores() if work.x.device.type == "cpu" else 1
    ways = [replace(way, threads=count) for count in candidates(cores)]
    if cores > 1 and work.hosts > 1:
        ways.append(replace(way, processes=cores))
    return ways


def _start(way: Way, work: Work) -> Training:
    """Makes the hosts, in the processes of ``way``."""
    return workers(way, work) if way.processes > 1 else Loop(way, work)


def _seconds_of_one(work: Work, way: Way) -> float:
    """Times a few steps of one host in this process."""
    tried = TRIED_STEPS if work.x.device.type == "cpu" else TRIED_STEPS_ON_A_GPU
    loop = Loop(way, replace(work, hosts=1))
    steps = min(tried, work.steps)

    def run() -> None:
        float(loop.train(0, steps))  # waits for a GPU

    return _best_time(run)


def _seconds_of_all(work: Work, way: Way) -> float:
    """Times an epoch of all hosts, on few samples, in the processes and threads of ``way``."""
    few = TRIED_STEPS * work.batch
    part = replace(work, x=work.x[:few].clone(), y=work.y[:few].clone())
    with closing(_start(way, part)) as loop:
        return _best_time(loop.epoch)


def _best_time(run: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of a few calls; the first one warms up."""
    run()
    times = []
    for _ in range(TURNS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
