"""A comparison of two ways to do the same work, and the sizes and devices at which a case makes comparisons."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from esper.config import ConfigError, Optimizer, Precision

Size = tuple[int, ...]


@dataclass(frozen=True)
class BenchCase:
    """Two ways to do the same work; calls that are timed are followed by a synchronization of ``device``.

    What is compared depends on the unit:

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
    turns: int | None = None  # max turns of each side; None: no limit of its own


@dataclass(frozen=True)
class BenchArgs:
    """Sizes, devices and effort of an `esper-bench` call, the same for all its cases."""

    sizes: tuple[Size, ...] = ()  # empty: each case's own
    devices: tuple[torch.device, ...] = (torch.device("cpu"),)  # in measuring order
    sweep: bool = False  # all sizes of a case that has more than its defaults
    quick: bool = False  # only enough work per turn to show that a case runs; bars do not apply then
    rounds: int = 15  # max turns of each side
    task: str = "digits"  # of train-task
    optimizer: Optimizer | None = None  # of train-task; None: the task's
    precision: Precision | None = None  # of train-task; None: the task's, and the faster one for the baseline
    seconds: float = 60.0  # a comparison stops after this time, once each side has had the min number of turns


@dataclass(frozen=True)
class Sizes:
    """Names of the numbers that make up a size of a case, such as ``ENVSxEPOCHS``, and its own sizes."""

    form: str
    default: tuple[Size, ...]  # the first one is the example in errors
    cuda: tuple[Size, ...] = ()  # on a GPU; empty: as on the CPU
    quick: tuple[Size, ...] = ()  # with --quick; empty: as without
    sweep: tuple[Size, ...] = ()  # with --sweep; empty: as without
    seconds: float = 0.0  # that a size takes, about, with all other options at their defaults, on two idle cores

    def of(self, args: BenchArgs) -> Iterator[tuple[torch.device, Size]]:
        """Yields the sizes to measure, on one device after another."""
        for device in args.devices:
            for size in args.sizes or self._usual(args, device):
                yield device, size

    def _usual(self, args: BenchArgs, device: torch.device) -> tuple[Size, ...]:
        """Returns the sizes that are measured if none is named."""
        if args.sweep and self.sweep:
            return self.sweep
        if args.quick and self.quick:
            return self.quick
        if device.type == "cuda" and self.cuda:
            return self.cuda
        return self.default

    def check(self, case: str, sizes: Sequence[Size]) -> None:
        """Raises ConfigError for a size with more or fewer numbers."""
        example = self.default[0]
        for size in sizes:
            if len(size) != len(example):
                raise ConfigError(
                    f"{case} takes --size {self.form}, for example {size_text(example)}, not {size_text(size)}"
                )


def size_text(size: Size) -> str:
    """``(4, 128, 8)`` -> ``"4x128x8"``."""
    return "x".join(map(str, size))


def parse_size(text: str) -> Size:
    """``"4x128x8"`` -> ``(4, 128, 8)``. Raises ConfigError for anything but positive integers separated by x."""
    if re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", text, re.ASCII) is None:
        raise ConfigError(f"a size is positive integers separated by x, for example 4x128x8; not {text!r}")
    return tuple(int(number) for number in text.split("x"))


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")
