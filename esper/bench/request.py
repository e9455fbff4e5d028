"""What an `esper-bench` call asks for, and the form of the sizes that a case takes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from esper.config import ConfigError

Size = tuple[int, ...]


@dataclass(frozen=True)
class SizeForm:
    """The numbers that make up a size of one case: ``SizeForm(("envs", "batch"), "4x128")``."""

    fields: tuple[str, ...]
    example: str

    def __str__(self) -> str:
        return "x".join(name.upper() for name in self.fields)

    def check(self, case: str, sizes: Sequence[Size]) -> None:
        """Raises ConfigError for a size with more or fewer numbers."""
        for size in sizes:
            if len(size) != len(self.fields):
                raise ConfigError(f"{case} takes --size {self}, for example {self.example}, not {written(size)}")


def parse_size(text: str) -> Size:
    """``"4x128x8"`` -> ``(4, 128, 8)``. Raises ConfigError for anything but positive integers separated by x."""
    if re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*)*", text, re.ASCII) is None:
        raise ConfigError(f"a size is positive integers separated by x, for example 4x128x8; not {text!r}")
    return tuple(int(number) for number in text.split("x"))


def written(size: Size) -> str:
    """``(4, 128, 8)`` -> ``"4x128x8"``."""
    return "x".join(str(number) for number in size)


@dataclass(frozen=True)
class BenchArgs:
    """What to measure of a case."""

    sizes: tuple[Size, ...] = ()
    """Sizes to measure; empty: the case's own."""
    devices: tuple[torch.device, ...] = (torch.device("cpu"),)
    """The CPU, a GPU or both, in measuring order."""
    sweep: bool = False
    """Whether to measure all sizes of a case that has more than its defaults."""
    quick: bool = False
    """Whether to do only enough work per turn to show that a case runs. Bars do not apply then."""
    seed: int = 0
