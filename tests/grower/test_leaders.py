"""A seed follows the parameter group of the layer that it sits on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from esper.grower.leaders import Leaders
from esper.hosts.site_path import SitePath
from tests.grower.loops import Loop, net


def model() -> Any:
    return nn.Sequential(
        nn.Linear(4, 4),
        nn.ReLU(),
        nn.Linear(4, 4),
        nn.Sequential(nn.ReLU()),
        nn.Linear(4, 2),
    )


PATHS = {f"r0c{number}": SitePath(str(number)) for number in range(5)}


def followed(network: Any, groups: list[dict[str, Any]]) -> dict[str, float]:
    optimizer = torch.optim.SGD(groups, lr=1.0)
    leaders = Leaders(network, PATHS, optimizer)
    return {name: leaders.group(name)["lr"] for name in PATHS}


def test_layers_without_parameters_follow_the_nearest_before_them() -> None:
    network = model()
    groups = [
        {"params": network[i].parameters(), "lr": rate}
        for i, rate in ((4, 0.4), (2, 0.2), (0, 0.1))
    ]
    assert followed(network, groups) == {
        "r0c0": 0.1,
        "r0c1": 0.1,
        "r0c2": 0.2,
        "r0c3": 0.2,
        "r0c4": 0.4,
    }


def test_a_layer_in_two_groups_follows_the_one_with_more_of_it() -> None:
    network = model()
    weights = [p for p in network.parameters() if p.dim() == 2]
    biases = [p for p in network.parameters() if p.dim() == 1]
    rates = followed(
        network, [{"params": biases, "lr": 0.5}, {"params": weights, "lr": 0.1}]
    )
    assert [rates[name] for name in ("r0c0", "r0c2", "r0c4")] == [0.1, 0.1, 0.1]


def test_a_frozen_layer_at_the_beginning_follows_the_first_group() -> None:
    network = model()
    rates = followed(network, [{"params": network[4].parameters(), "lr": 0.4}])
    assert set(rates.values()) == {0.4}


def test_groups_are_found_again_after_they_were_loaded_added_and_moved() -> None:
    network = model()
    optimizer = torch.optim.SGD(network[0].parameters(), lr=0.1)
    leaders = Leaders(
        network, {"r0c0": SitePath("0"), "r0c2": SitePath("2")}, optimizer
    )
    assert leaders.group("r0c2") is optimizer.param_groups[0]
    optimizer.load_state_dict(optimizer.state_dict())
    assert leaders.group("r0c0") is optimizer.param_groups[0]
    optimizer.add_param_group({"params": network[2].parameters(), "lr": 0.2})
    optimizer.param_groups.reverse()
    assert [leaders.group(name)["lr"] for name in ("r0c0", "r0c2")] == [0.1, 0.2]


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_seed_has_the_rate_of_its_layer_at_every_step(factor: float) -> None:
    network = net()

    def make(_parameters: Any) -> torch.optim.Optimizer:
        parts = [
            {"params": network.head.parameters(), "lr": 0.3},
            {"params": network.body.parameters()},
        ]
        return torch.optim.SGD(parts, 0.1, momentum=0.9)

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)

    loop = Loop(make, model=network, make_scheduler=schedule, lr_factor=factor)
    for _ in range(loop.epochs):
        loop.run(1)
        head, body, *seeds = [group["lr"] for group in loop.optimizer.param_groups]
        assert head == pytest.approx(3 * body)
        assert seeds == pytest.approx([factor * body] * len(seeds))
