"""Inputs of several tensors, and the tensors in outputs."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from esper.config import ConfigError
from esper.hosts.inputs import (
    Arguments,
    empty_like,
    features_of,
    form_of,
    gathered,
    logits_of,
    select_rows,
    stack,
    with_features,
)

A, B = torch.arange(12).view(6, 2), torch.rand(6, 3)


def test_rows_are_selected_split_and_copied_in_all_tensors() -> None:
    for x in (Arguments({"a": A, "b": B}), Arguments((A, B))):
        assert len(x) == 6
        for part, a, b in zip(
            x.tensor_split(4), A.tensor_split(4), B.tensor_split(4), strict=True
        ):
            assert torch.equal(part.tensors[0], a)
            assert torch.equal(part.tensors[1], b)
        rows = torch.tensor([3, 0])
        buffer = empty_like(x, 2)
        select_rows(x, rows, out=buffer)
        assert (
            [t.tolist() for t in buffer.tensors]
            == [t.tolist() for t in x[rows].tensors]
            == [
                A[rows].tolist(),
                B[rows].tolist(),
            ]
        )
        copied = x.clone()
        copied.tensors[0].zero_()
        assert A.any()
    assert form_of(Arguments({"a": A, "b": B}), of_sample=True) == (
        "a torch.int64 of shape (2,), b torch.float32 of shape (3,)"
    )
    rows = stack([{"a": A[i], "b": B[i]} for i in (4, 2)])
    assert isinstance(rows, Arguments)
    assert torch.equal(rows.tensors[1], B[[4, 2]])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "a dict or tuple of such tensors"),
        ({"a": A, "b": "text"}, "a dict or tuple of such tensors"),
        ((A, torch.zeros(())), "a dict or tuple of such tensors"),
        (
            {"a": A, "b": B[:2]},
            r"different numbers of samples: a torch.int64 of shape \(6, 2\), b",
        ),
    ],
)
def test_inputs_that_do_not_belong_together_are_refused(
    values: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Arguments(values)


def test_a_call_gives_inputs_by_name_or_by_position() -> None:
    assert gathered((A,), {}) is A
    assert gathered((), {"a": A, "b": B}).values.keys() == {"a", "b"}
    assert gathered((A, B), {}).tensors == (A, B)
    with pytest.raises(ConfigError, match="all by name, or all by position"):
        gathered((A,), {"b": B})


class Masked(nn.Module):
    """Features [B, 5, 4] and a mask [B, 5] to logits [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        h = torch.relu(self.first(features)) * mask[:, :, None]
        return self.head(h.sum(1) / mask.sum(1, keepdim=True))  # type: ignore[no-any-return]


class Packed(Masked):
    """The same network, with the mask as the last of five features."""

    def forward(self, packed: Tensor) -> Tensor:  # type: ignore[override]
        # A product with strided features may be summed in another order, which depends on the processor.
        return super().forward(
            packed[:, :, :4].contiguous(), packed[:, :, 4].contiguous()
        )


@pytest.mark.parametrize(
    "output",
    [
        torch.ones(2),
        {"loss": None, "logits": torch.ones(2)},
        SimpleNamespace(logits=torch.ones(2)),
    ],
)
def test_logits_are_found_in_what_a_network_returns(output: object) -> None:
    assert torch.equal(logits_of(output), torch.ones(2))
    assert logits_of((output, 1)) == (output, 1)


def test_a_named_tuple_stays_one_when_its_features_change() -> None:
    pair = namedtuple("pair", "h rest")
    found = with_features(pair(torch.zeros(2), 3), torch.ones(2))
    assert type(found) is pair
    assert features_of(found) is found.h
    assert found.rest == 3


def test_a_mask_travels_with_its_batch() -> None:
    """A host of two inputs trains to the bits of one whose inputs are packed in one tensor."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(48, 5, 4, generator=generator)
    mask = (torch.rand(48, 5, generator=generator) < 0.7).float()
    mask[:, 0] = 1
    y = ((features[:, :, 0] * mask).sum(1) > 0).long()
    packed = torch.cat([features, mask[:, :, None]], dim=2)
    trained = []
    for x, make in (({"features": features, "mask": mask}, Masked), (packed, Packed)):
        torch.manual_seed(0)
        host = esper.graft(make(), {"r0c0": "first"}, "encoder")
        optimizer = torch.optim.SGD(host.parameters(), 0.5)
        split = esper.Split(x, y)
        for first in range(0, 48, 16):
            optimizer.zero_grad()
            logits = host(split.inputs(first, first + 16))
            nn.functional.cross_entropy(logits, y[first : first + 16]).backward()
            optimizer.step()
        trained.append([p.tolist() for p in host.parameters()])
        assert host(split.inputs(0, 48)).shape == (48, 2)
    assert trained[0] == trained[1]
