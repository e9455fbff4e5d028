"""The baseline that replays CUDA graphs: its hosts learn, and an epoch takes each sample once."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from esper.bench.plain import plain_cnn
from esper.bench.tuned import Loop, Recipe, Way, Work
from esper.config import Optimizer

pytestmark = pytest.mark.cuda


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    y = torch.arange(64) % 10
    x = torch.randn(64, 3, 8, 8) + y.view(-1, 1, 1, 1)
    return x.cuda(), y.cuda()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_hosts_learn_from_replayed_steps(optimizer: Optimizer) -> None:
    recipe = Recipe(partial(plain_cnn, 3, 10, 4, 2), optimizer)
    loop = Loop(Way(captured=True), Work(recipe, 2, *data(), batch=16))
    first = loop.epoch()
    for _ in range(8):
        last = loop.epoch()
    assert last < 0.8 * first


def test_an_epoch_replays_a_step_for_each_batch_of_a_new_order() -> None:
    x, y = data()
    loop = Loop(
        Way(captured=True),
        Work(Recipe(partial(plain_cnn, 3, 10, 4, 2)), 1, x, y, batch=16),
    )
    graph = loop.graphs[0]
    loop.train(0, 4)
    assert int(graph.position) == 4
    assert torch.equal(
        graph.order.flatten().sort().values, torch.arange(64, device=x.device)
    )
