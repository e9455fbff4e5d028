"""Tensors of networks, listed without a walk through their modules."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from esper.training.tensors import buffers_of, parameters_of


def names(network: nn.Module) -> tuple[list[str], list[str]]:
    return [name for name, _ in parameters_of(network)], [
        name for name, _ in buffers_of(network)
    ]


def as_torch_has_them(network: nn.Module) -> tuple[list[str], list[str]]:
    return [name for name, _ in network.named_parameters()], [
        name for name, _ in network.named_buffers()
    ]


def test_the_names_and_their_order_are_those_of_torch_also_when_modules_change() -> (
    None
):
    network = nn.Sequential(
        nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 1))
    )
    assert names(network) == as_torch_has_them(network)
    network[1].register_buffer("late", torch.ones(1))
    assert names(network) == as_torch_has_them(network)
    network.append(network[0])  # its parameters come once
    assert names(network) == as_torch_has_them(network)
    network[2][0] = nn.Linear(2, 1, bias=False)
    assert names(network) == as_torch_has_them(network)
    assert dict(parameters_of(network))["2.0.weight"] is network[2][0].weight
    network[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert dict(parameters_of(network))["0.weight"] is network[0].weight


def test_a_network_is_not_kept_by_its_list() -> None:
    network = nn.Sequential(nn.Linear(2, 2))
    names(network)
    gone = weakref.ref(network)
    del network
    gc.collect()
    assert gone() is None
