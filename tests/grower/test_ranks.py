"""Ranks of a data-parallel loop grow the same network."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from esper.config import ConfigError
from esper.grower.gradients import plain_model
from tests.grower.loops import (
    Loop,
    Net,
    X,
    Y,
    net,
    plain,
    same,
    scores,
    stages,
)


class DropsLayers(Net):
    """Leaves out its second layer, and the seed there, in some passes: others on each rank, and some on both."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.drops = drops
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        dropped = (
            self.drops
            and self.training
            and self.passes % 4 in (torch.distributed.get_rank(), 3)
        )
        h = self.body[:2](x)
        return self.head(h if dropped else self.body[2:](h))  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("drops", [False, True])
def test_two_ranks_grow_the_same_network(tmp_path: Any, drops: bool) -> None:
    """Decisions are those of rank 0, whatever the others measure, and whichever pass leaves the seed out."""
    mp.spawn(_rank, (str(tmp_path / "store"), str(tmp_path), drops), nprocs=2)  # type: ignore[no-untyped-call]
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert one["stages"] == other["stages"]
    assert one["stages"][-1] == "FOSSILIZED"
    assert same(one["weights"], other["weights"])


def _rank(rank: int, store: str, folder: str, drops: bool) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(DropsLayers(drops), find_unused_parameters=drops)
    loop = Loop(model=model, sites={"r0c0": "body.2"})
    for _ in range(loop.epochs):
        loop.model.train()
        for rows in torch.arange(64).split(16):
            plain(loop, X[rows][rank::2], Y[rows][rank::2])
        loop.steps.append(
            loop.grower.step(lambda model: scores(model) * (1 if rank == 0 else 0.1))
        )
    network = loop.grower.finish()
    torch.save(
        {
            "weights": {name: p.detach() for name, p in network.named_parameters()},
            "stages": stages(loop),
        },
        f"{folder}/{rank}.pt",
    )
    torch.distributed.destroy_process_group()


class Fabric(nn.Module):
    """Holds the wrapped model and the model itself, as Lightning Fabric's wrapper does."""

    def __init__(self, wrapped: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self._forward_module, self._original_module = wrapped, model

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_module(x)  # type: ignore[no-any-return]


class HalfWrapped(nn.Module):
    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped, self.head = wrapped, nn.Linear(3, 3)


def _refusals(rank: int, store: str, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    said: dict[str, str] = {}

    def refused(name: str, do: Any) -> None:
        try:
            do()
        except ConfigError as error:
            said[name] = str(error)

    model = net()
    wrapped = DistributedDataParallel(model)
    refused("bare", lambda: Loop(model=net()))
    refused("part", lambda: plain_model(HalfWrapped(wrapped)))
    inner, ranks = plain_model(Fabric(wrapped, model))
    found = inner is model and ranks.parallel
    with wrapped.join():
        refused("join", Loop(model=wrapped).train)
    alone = torch.distributed.new_group([rank], use_local_synchronization=True)
    _, apart = plain_model(DistributedDataParallel(net(), process_group=alone))
    values = apart.largest(np.array([float(rank)])), apart.of_first(rank), apart.first
    torch.save({"said": said, "found": found, "values": values}, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_ranks_are_found_in_any_wrapper_or_refused_with_a_sentence(
    tmp_path: Any,
) -> None:
    mp.spawn(_refusals, (str(tmp_path / "store"), str(tmp_path)), nprocs=2)  # type: ignore[no-untyped-call]
    for rank in range(2):
        result = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        said = result["said"]
        assert "2 ranks, and the model is in no DistributedDataParallel" in said["bare"]
        assert "only a part of the model" in said["part"]
        assert "in join()" in said["join"]
        assert result["found"]
        largest, first, is_first = result["values"]
        assert (float(largest[0]), first, is_first) == (rank, rank, True), (
            "each group has ranks of its own"
        )


def test_ranks_that_come_after_the_grower_was_made_are_refused_in_its_first_step() -> (
    None
):
    loop = Loop()
    before = [p.detach().clone() for p in loop.model.parameters()]
    with (
        mock.patch.object(torch.distributed, "is_initialized", return_value=True),
        mock.patch.object(torch.distributed, "get_world_size", return_value=4),
        pytest.raises(
            ConfigError, match="4 ranks, and the model is in no DistributedDataParallel"
        ),
    ):
        loop.train()
    assert all(map(torch.equal, loop.model.parameters(), before))
