"""Outputs of modules: features in tuples, and logits in what a network returns."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from esper.hosts.outputs import features_of, logits_of, with_features


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
