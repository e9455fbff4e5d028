"""The baseline of the cases about training: hosts in ordinary PyTorch, in the fastest of the loops of a careful user.

All have fused optimizers and never wait for a number. The layout and the precision that train a host fastest are taken,
compiled if that is faster. On a CPU, several hosts are spread over a one-thread process per core; on a GPU, the step of
each host is a CUDA graph on its own stream.

Batches are indexed from one tensor in random order, which is faster than a DataLoader.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import multiprocessing as processes
from torch.nn import functional as F
from torch.utils.benchmark import set_torch_threads

from esper.bench.case import dtype_name
from esper.config import Optimizer
from esper.training.execution.cores import usable_cores

LR = 0.05
MOMENTUM = 0.9
DECAY = 5e-4

TRIED_SECONDS = 0.4
"""Seconds for which variants and numbers of threads are timed at a time, on one host."""
REPEATS = 3
"""Number of times that they are timed; the best time counts."""
WARM_UP_STEPS = 3
"""Steps before a CUDA graph is captured, in which libraries choose their algorithms and optimizers make their state."""

Epoch = Callable[[], Any]
"""Trains all hosts for an epoch."""


@dataclass(frozen=True)
class Workload:
    """Hosts, and the data that they are trained on in batches."""

    build: Callable[[], nn.Module]
    """Makes a host; other processes import it by its name."""
    hosts: int
    x: Tensor
    """Inputs [N, ...]."""
    y: Tensor
    """Their classes, int64 [N] or [N, T]."""
    batch: int
    optimizer: Optimizer = "sgd"
    precisions: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    """Those that ``tuned`` tries."""

    @property
    def steps(self) -> int:
        """Number of full batches of an epoch."""
        return len(self.y) // self.batch


@dataclass(frozen=True)
class Variant:
    """One way to write the training loop."""

    precision: torch.dtype = torch.float32
    channels_last: bool = True
    compiled: bool = False

    def name(self) -> str:
        """Returns words for the table."""
        layout = "channels_last" if self.channels_last else "contiguous"
        how = "compiled" if self.compiled else "eager"
        return f"{dtype_name(self.precision)} {layout}, {how}"


class TorchHosts:
    """Hosts of this process, trained one after another with ``threads`` intra-op threads."""

    def __init__(self, work: Workload, variant: Variant) -> None:
        self.work = work
        self.variant = variant
        self.threads = 1
        self.device = work.x.device
        layout = torch.contiguous_format
        if variant.channels_last and work.x.dim() == 4:
            layout = torch.channels_last
        self.x = work.x.contiguous(memory_format=layout)
        hosts = [work.build().to(self.device).train() for _ in range(work.hosts)]
        self.hosts = [host.to(memory_format=layout) for host in hosts]  # type: ignore[call-overload]
        self.forward = self.hosts
        if variant.compiled:
            self.forward = [torch.compile(host) for host in self.hosts]
        captured = self.device.type == "cuda"
        self.optimizers = [self._optimizer(host, captured) for host in self.hosts]
        self.graphs: list[StepGraph] = []
        if captured:
            for number in range(work.hosts):
                self.graphs.append(StepGraph(partial(self.step, number), work))

    def _optimizer(self, host: nn.Module, captured: bool) -> torch.optim.Optimizer:
        if self.work.optimizer == "adamw":
            return torch.optim.AdamW(host.parameters(), LR, weight_decay=DECAY, fused=True, capturable=captured)
        return torch.optim.SGD(host.parameters(), LR, MOMENTUM, weight_decay=DECAY, fused=True)

    def epoch(self) -> list[float]:
        """Trains every host once on all full batches; returns their mean losses."""
        steps = self.work.steps
        if self.graphs:
            losses = replay(self.graphs, [self.order(steps) for _ in self.graphs])
        else:
            losses = [self.train(number, steps) for number in range(len(self.hosts))]
        return list(map(float, losses))

    def train(self, number: int, steps: int) -> Tensor:
        """Trains one host on random batches; returns its mean loss, a scalar on the device."""
        if self.graphs:
            return replay([self.graphs[number]], [self.order(steps)])[0]
        total = torch.zeros((), device=self.device)
        with set_torch_threads(self.threads):
            for rows in self.order(steps):
                total += self.step(number, rows)
        return total / steps

    def order(self, steps: int) -> Tensor:
        """Returns random rows of the data, int64 [steps, batch]."""
        order = torch.randperm(len(self.work.y), device=self.device)
        return order[: steps * self.work.batch].view(steps, self.work.batch)

    def step(self, number: int, rows: Tensor) -> Tensor:
        """Trains one host on one batch; returns its loss, a scalar on the device."""
        precision = self.variant.precision
        optimizer = self.optimizers[number]
        y = self.work.y[rows].flatten()
        optimizer.zero_grad()
        with torch.autocast(self.device.type, precision, enabled=precision != torch.float32):
            logits = self.forward[number](self.x[rows]).flatten(0, -2)
            loss = F.cross_entropy(logits, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()


class StepGraph:
    """A training step as a CUDA graph on its own stream; each replay takes the next row of ``order``.

    ``step`` trains on rows of the data, int64 [batch], and returns the loss.
    """

    def __init__(self, step: Callable[[Tensor], Tensor], work: Workload) -> None:
        device = work.x.device
        self.order = torch.arange(work.batch, device=device).repeat(work.steps, 1)
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


@contextmanager
def tuned(work: Workload, compiles: bool = True) -> Iterator[tuple[str, Epoch]]:
    """Yields the name of the loop of a careful user, and an epoch of it.

    ``compiles`` is whether a compiled variant is tried, which takes half a minute or more.
    """
    layouts = [True]
    if work.x.dim() == 4:
        layouts = [True, False]
    best = fastest(work, [Variant(precision, layout) for precision in work.precisions for layout in layouts])
    if compiles:
        best = fastest(work, [best, replace(best, compiled=True)])
    name = f"tuned PyTorch: {best.name()}"
    parts = shares(work.hosts, usable_cores())
    if work.x.device.type == "cuda" or len(parts) == 1:
        hosts = TorchHosts(work, best)
        yield f"{name}, {choose_threads(hosts)}", hosts.epoch
        return
    work.x.share_memory_()  # type: ignore[no-untyped-call]
    work.y.share_memory_()  # type: ignore[no-untyped-call]
    makers = [partial(_torch_epoch, replace(work, hosts=count), best) for count in parts]
    with in_processes(makers) as epoch:
        yield f"{name}, {len(parts)} processes of 1 thread", epoch


def fastest(work: Workload, variants: Sequence[Variant]) -> Variant:
    """Returns the variant that trains one host fastest, with one thread."""
    alone = replace(work, hosts=1)
    seconds = {variant: step_seconds(TorchHosts(alone, variant)) for variant in variants}
    return min(seconds, key=seconds.__getitem__)


def choose_threads(hosts: TorchHosts) -> str:
    """Gives hosts on a CPU the number of intra-op threads with which one trains fastest; returns how they train."""
    if hosts.graphs:
        return "a CUDA graph of each host on its own stream"
    if hosts.device.type == "cuda":
        return "one stream"
    cores = usable_cores()
    seconds = {}
    for threads in {1, 2, 3, 4, 6, 8, 16, 32, 64, cores}:
        if threads <= cores:
            hosts.threads = threads
            seconds[threads] = step_seconds(hosts)
    hosts.threads = min(seconds, key=seconds.__getitem__)
    return f"best threads: {hosts.threads}"


def step_seconds(hosts: TorchHosts) -> float:
    """Returns the seconds of a step of the first host, the best of a few times."""
    _wait_for(hosts, 1)  # compiles
    few = min(2, hosts.work.steps)
    alone = timeit.timeit(partial(_wait_for, hosts, few), number=1) / few
    steps = max(1, min(int(TRIED_SECONDS / alone), hosts.work.steps))
    return min(timeit.repeat(partial(_wait_for, hosts, steps), number=1, repeat=REPEATS)) / steps


def _wait_for(hosts: TorchHosts, steps: int) -> float:
    return float(hosts.train(0, steps))


@contextmanager
def in_processes(makers: Sequence[Callable[[], AbstractContextManager[Epoch]]]) -> Iterator[Epoch]:
    """Yields an epoch of hosts that are spread over processes, each with one intra-op thread.

    ``makers`` has a function for each process, which makes its hosts there; the process imports it by its name. The
    epoch returns the results of all.
    """
    context = processes.get_context("spawn")
    with ExitStack() as stack:
        pools = []
        for make in makers:
            pool = ProcessPoolExecutor(1, context, _begin, (make,))
            pools.append(stack.enter_context(pool))
            stack.callback(pool.submit, _end)

        def epoch() -> list[Any]:
            waiting = [pool.submit(_epoch) for pool in pools]
            return [result.result() for result in waiting]

        yield epoch


_here = ExitStack()  # in such a process: what is closed at its end
_epochs: list[Epoch] = []


def _begin(make: Callable[[], AbstractContextManager[Epoch]]) -> None:
    torch.set_num_threads(1)
    _epochs.append(_here.enter_context(make()))


def _epoch() -> Any:
    return _epochs[0]()


def _end() -> None:
    _here.close()


@contextmanager
def _torch_epoch(work: Workload, variant: Variant) -> Iterator[Epoch]:
    yield TorchHosts(work, variant).epoch


def shares(hosts: int, processes: int) -> list[int]:
    """Returns the number of hosts of each process that has any; they are dealt out in turns."""
    counts = [len(range(number, hosts, processes)) for number in range(processes)]
    return [count for count in counts if count]


def plain_cnn(
    channels: int,
    classes: int,
    base: int,
    blocks: int,
    pool_last: bool = True,
) -> nn.Sequential:
    """Returns the network of ``CNNHost`` without slots, of public modules."""
    layers: list[nn.Module] = []
    for block in range(blocks):
        width = base * 2**block
        layers += [
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        if pool_last or block < blocks - 1:
            layers.append(nn.MaxPool2d(2))
        channels = width
    return nn.Sequential(
        *layers,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )
