"""The baseline that replays CUDA graphs: its hosts learn, and an epoch takes each sample once."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from esper.bench.baselines import TorchHosts, Variant, Workload, plain_cnn
from esper.config import Optimizer

pytestmark = pytest.mark.cuda


def work(hosts: int, optimizer: Optimizer = "sgd") -> Workload:
    torch.manual_seed(0)
    y = torch.arange(64) % 10
    x = torch.randn(64, 3, 8, 8) + y.view(-1, 1, 1, 1)
    build = partial(plain_cnn, 3, 10, 4, 2)
    return Workload(build, hosts, x.cuda(), y.cuda(), 16, optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_hosts_learn_from_replayed_steps(optimizer: Optimizer) -> None:
    hosts = TorchHosts(work(2, optimizer), Variant())
    first = hosts.epoch()
    for _ in range(8):
        last = hosts.epoch()
    for now, before in zip(last, first, strict=True):
        assert now < 0.8 * before


def test_an_epoch_replays_a_step_for_each_batch_of_a_new_order() -> None:
    hosts = TorchHosts(work(1), Variant())
    (graph,) = hosts.graphs
    hosts.epoch()
    assert int(graph.position) == 4
    order = graph.order.flatten().sort().values
    assert torch.equal(order, torch.arange(64, device=order.device))
