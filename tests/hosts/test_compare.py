"""Outputs of any form are compared by what their dtypes round."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.hosts.example import coarsest_dtype, difference, tensors_in, tolerance


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None


Named = namedtuple("Named", "h state")

ONES = torch.ones(2, 3)
FORMS: list[Any] = [
    ONES,
    (ONES, None, 3),
    [ONES, {"more": ONES}],
    {"out": ONES, "aux": (ONES, ONES)},
    Output(ONES, (ONES,)),
    Named(ONES, "state"),
    ONES.to_sparse(),
    ONES.to(torch.complex64),
    torch.tensor([1, 2]),
    torch.zeros(0, 4),
    torch.tensor([float("inf"), float("nan")]),
]


@pytest.mark.parametrize("output", FORMS, ids=str)
def test_an_output_equals_itself(output: Any) -> None:
    assert difference(output, output) is None
    assert all(isinstance(tensor, Tensor) for tensor in tensors_in(output))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ((ONES,), "there are 2 tensors in one output and 1 in the other"),
        ((ONES, ONES[:1]), "of shape"),
        ((ONES, ONES.double()), "torch.float64"),
        ((ONES, ONES * 1.01), "values differ by 0.01"),
        ((ONES, ONES * float("nan")), "values differ by nan"),
    ],
)
def test_a_difference_is_described(other: Any, words: str) -> None:
    assert words in str(difference((ONES, ONES), other))


def test_integers_have_no_tolerance() -> None:
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 3])) is not None
    assert tolerance(torch.int64) == 0


@pytest.mark.parametrize(
    ("dtype", "close", "far"),
    [
        (torch.float32, 1e-5, 1e-3),
        (torch.float64, 1e-14, 1e-9),
        (torch.bfloat16, 0.02, 0.5),
        (torch.float16, 0.005, 0.1),
    ],
)
def test_the_tolerance_is_what_the_dtype_rounds(
    dtype: torch.dtype, close: float, far: float
) -> None:
    one = torch.ones(4, dtype=dtype)
    assert difference(one, one + close) is None
    assert difference(one, one + far) is not None


def test_outputs_that_were_computed_in_half_precision_may_differ_by_what_it_rounds() -> (
    None
):
    one = torch.ones(4)
    assert difference(one, one + 0.01) is not None
    assert difference(one, one + 0.01, torch.bfloat16) is None
    assert difference(one, one + 0.5, torch.bfloat16) is not None
    assert difference(torch.tensor([1]), torch.tensor([2]), torch.bfloat16) is not None


def test_the_coarsest_dtype_of_a_network_is_that_of_its_shortest_floats() -> None:
    wide, half = nn.Linear(2, 2).double(), nn.Linear(2, 2).bfloat16()
    assert coarsest_dtype(wide) == torch.float64
    assert coarsest_dtype(nn.Sequential(wide, nn.Linear(2, 2))) == torch.float32
    assert coarsest_dtype(nn.Sequential(wide, half, nn.Linear(2, 2))) == torch.bfloat16


class Node:
    """An object that refers to itself."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.me, self.parts = value, self, [{"more": value + 1}]


def test_tensors_are_found_in_attributes_of_objects() -> None:
    assert (
        len(list(tensors_in(torch.distributions.Normal(torch.zeros(2), torch.ones(2)))))
        == 2
    )
    assert [float(t) for t in tensors_in(Node(torch.tensor(1.0)))] == [1.0, 2.0]
    assert list(tensors_in([nn.Linear(2, 2), Tensor, len, "text", None])) == []
    assert difference(Node(torch.ones(2)), Node(torch.zeros(2))) is not None
