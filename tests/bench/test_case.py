"""Sizes of cases, as typed and by default."""

from __future__ import annotations

import pytest
import torch

from esper.bench.case import BenchArgs, Case, parse_size
from esper.config import ConfigError

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def at(args: BenchArgs, device: torch.device, size: tuple[int, ...]):  # type: ignore[no-untyped-def]
    yield device, size


CASE = Case(
    "ENVSxEPOCHS",
    ((8, 30),),
    at,
    cuda=((64, 30),),
    quick=((2, 4),),
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4x",
        "0x1",
        "4 x 1",
        "٤x1",
    ],
)
def test_anything_but_positive_integers_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="for example 4x128x8"):
        parse_size(text)


BOTH = BenchArgs(devices=(CPU, CUDA))
QUICK = BenchArgs(devices=(CPU, CUDA), quick=True)
GIVEN = (parse_size("1x2"), parse_size("3x4"))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (BOTH, [(CPU, (8, 30)), (CUDA, (64, 30))]),
        (QUICK, [(CPU, (2, 4)), (CUDA, (2, 4))]),
        (BenchArgs(GIVEN), [(CPU, (1, 2)), (CPU, (3, 4))]),
        (BenchArgs(GIVEN[:1], quick=True), [(CPU, (1, 2))]),
    ],
)
def test_sizes_depend_on_the_device_and_the_effort_unless_given(
    args: BenchArgs, expected: list[tuple[torch.device, tuple[int, ...]]]
) -> None:
    assert list(CASE.comparisons(args)) == expected
