"""Ranks of a data-parallel loop grow the same network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.grower.loops import Loop, Net, X, Y, plain, same, scores, stages


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
