"""Ranks of a data-parallel loop grow the same network."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from tests.grower.loops import (
    Loop,
    X,
    Y,
    net,
    plain,
    same,
    scores,
    stages,
)


@pytest.mark.slow
def test_two_ranks_grow_the_same_network(tmp_path: Any) -> None:
    """Decisions are those of rank 0, whatever the others measure."""
    mp.spawn(_rank, (str(tmp_path / "store"), str(tmp_path)), nprocs=2)  # type: ignore[no-untyped-call]
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert one["stages"] == other["stages"]
    assert one["stages"][-1] == "FOSSILIZED"
    assert same(one["weights"], other["weights"])


def _rank(rank: int, store: str, folder: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    loop = Loop(model=DistributedDataParallel(net()))
    assert loop.grower is not None
    for _ in range(loop.epochs):
        loop.model.train()
        for rows in torch.arange(64).split(16):
            plain(loop, X[rows][rank::2], Y[rows][rank::2])
        loop.steps.append(loop.grower.step(lambda model: scores(model) * (1 if rank == 0 else 0.1)))
    network = loop.grower.finish()
    torch.save(
        {"weights": {name: p.detach() for name, p in network.named_parameters()}, "stages": stages(loop)},
        f"{folder}/{rank}.pt",
    )
    torch.distributed.destroy_process_group()
