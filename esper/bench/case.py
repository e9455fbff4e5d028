"""Comparisons of two ways to do the same work, and the cases that make comparisons at sizes and on devices."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

import torch

from esper.bench import CASES
from esper.config import ConfigError, Optimizer, Precision

Size = tuple[int, ...]


@dataclass(frozen=True)
class BenchPair:
    """Two ways to do the same work; timed calls are followed by a synchronization of ``device``.

    The unit says which numbers are compared:

    - ``us``: the time per call.
    - with ``amount``: the rate at which calls do that much work; the unit is a rate such as ``images/s``.
    - otherwise: the numbers that the callables return.
    """

    case: str
    size: str
    device: torch.device
    baseline: str
    run: Callable[[], object]
    run_baseline: Callable[[], object]
    bar: float | None = None  # min ratio; None: only reported
    unit: str = "us"
    amount: float | None = None
    turns: int | None = None  # max turns of each side; None: as many as --rounds


@dataclass(frozen=True)
class BenchArgs:
    """Sizes, devices and effort of an `esper-bench` call, the same for all its cases."""

    sizes: tuple[Size, ...] = ()  # empty: each case's own
    devices: tuple[torch.device, ...] = (torch.device("cpu"),)  # in measuring order
    quick: bool = False  # only enough work per turn to show that a case runs; bars do not apply then
    rounds: int = 15  # max turns of each side
    task: str = "digits"  # of train-task, grow-task and workers
    optimizer: Optimizer | None = None  # of the same; None: the task's
    precision: Precision | None = None  # of the same; None: the task's, and the faster one for the baseline
    seconds: float = 60.0  # a comparison stops after this time, once each side has had the min number of turns


@dataclass(frozen=True)
class Case:
    """Comparisons of one kind, and the sizes at which they are made."""

    form: str
    """Names of the numbers of a size, such as ``ENVSxBATCH``."""
    sizes: tuple[Size, ...]
    """The default; the first size is the example in errors."""
    compare: Callable[[BenchArgs, torch.device, Size], Iterator[BenchPair]]
    """Yields the comparisons of one size. Raises ConfigError if the baseline is not installed."""
    cuda: tuple[Size, ...] = ()
    """Sizes on a GPU; empty: as on the CPU. The same holds for ``--quick``."""
    quick: tuple[Size, ...] = ()

    def comparisons(self, args: BenchArgs) -> Iterator[BenchPair]:
        """Yields all comparisons, on one device after another."""
        for device in args.devices:
            for size in self.sizes_on(device, args):
                yield from self.compare(args, device, size)

    def sizes_on(self, device: torch.device, args: BenchArgs) -> tuple[Size, ...]:
        """Returns the sizes to measure on ``device``."""
        own = self.sizes
        if device.type == "cuda":
            own = self.cuda or own
        if args.quick:
            own = self.quick or own
        return args.sizes or own

    def check(self, name: str, size: Size) -> None:
        """Raises ConfigError for a size with more or fewer numbers."""
        example = self.sizes[0]
        if len(size) != len(example):
            raise ConfigError(
                f"{name} takes --size {self.form}, for example {size_text(example)}, not {size_text(size)}"
            )


def load_case(name: str) -> Case:
    """Imports the case ``name``, a key of :data:`esper.bench.CASES`."""
    case: Case = import_module(f"esper.bench.{CASES[name]}").CASES[name]
    return case


def size_text(size: Size) -> str:
    """``(4, 128, 8)`` -> ``"4x128x8"``."""
    return "x".join(map(str, size))


MAX_SIZE = 2**31
"""Max product of the numbers of a size."""


def parse_size(text: str) -> Size:
    """``"4x128x8"`` -> ``(4, 128, 8)``. Raises ConfigError for anything but positive integers separated by x."""
    if re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", text, re.ASCII) is None:
        raise ConfigError(f"a size is positive integers separated by x, for example 4x128x8; not {text!r}")
    size = tuple(int(number) for number in text.split("x"))
    if math.prod(size) > MAX_SIZE:
        raise ConfigError(f"a size of {text} does not fit in memory; the product of its numbers is at most {MAX_SIZE}")
    return size


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")
