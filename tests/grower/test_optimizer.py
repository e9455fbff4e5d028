"""Optimizers, schedules, accumulation and scaling of a loop work on while seeds come and go."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.core.action import Op
from esper.grower.optimizer import ParamGroupMatcher
from esper.hosts.sources import SitePath
from esper.ops.optimizer import AdamW
from tests.grower.loops import (
    GROW,
    LENIENT,
    Loop,
    Net,
    net,
    plain,
    plant,
    same,
    script,
    shadowed,
    stages,
    weights,
)


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
    leaders = ParamGroupMatcher(network, PATHS, optimizer)
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


def test_groups_are_found_again_after_they_were_loaded_added_and_moved() -> None:
    network = model()
    optimizer = torch.optim.SGD(network[0].parameters(), lr=0.1)
    leaders = ParamGroupMatcher(
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


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (torch.optim.SGD, {"momentum": 0.5, "dampening": 0.1}),
        (torch.optim.AdamW, {"betas": (0.5, 0.6), "eps": 1e-3}),
        (torch.optim.RMSprop, {"alpha": 0.7, "eps": 1e-3}),
        (torch.optim.NAdam, {"momentum_decay": 0.1, "eps": 1e-3}),
        (AdamW, {"betas": (0.5, 0.6), "eps": 1e-3}),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_a_seed_has_the_options_that_a_loop_gives_its_layer(
    make: Any, changes: dict[str, Any], at_once: bool
) -> None:
    """A seed that is tried keeps a decay of its own; one that is a part of the model at once decays as its layer."""
    config = LENIENT.with_values(env={"at_once": at_once})
    sites = {"r2c0": "body.0 -> body.2"}
    action = plant("r2c0", "widen_whole")
    loop = Loop(
        lambda p: make(p, lr=0.01),
        controller=script({0: action}),
        sites=sites,
        config=config,
    ).run(2)
    *of_layers, seed = loop.optimizer.param_groups
    for group in of_layers:
        group.update(changes, weight_decay=0.25)
    loop.run(1)
    assert {key: seed[key] for key in changes} == changes
    assert seed["weight_decay"] == (0.25 if at_once else 0.0)


def test_planting_adds_a_group_and_pruning_removes_it_and_its_state() -> None:
    actions = {**GROW, 9: (Op.PRUNE, {"slot": "r0c0", "alpha_speed": 0})}
    loop = Loop(
        lambda p: torch.optim.Adam(p, 0.01),
        controller=script(actions),
        lr_factor=0.5,
        weight_decay=0.125,
    )
    host = set(loop.model.parameters())
    loop.run(9)
    optimizer = loop.optimizer
    first, seed = optimizer.param_groups
    assert seed["lr"] == 0.5 * first["lr"]
    assert (seed["weight_decay"], first["weight_decay"]) == (0.125, 0)
    assert set(optimizer.state) == host | set(seed["params"])
    before = {p: copy.deepcopy(optimizer.state[p]) for p in host}
    loop.run(1)
    assert len(optimizer.param_groups) == 1
    assert set(optimizer.state) == host
    assert stages(loop)[-1] in ("PRUNED", "EMBARGOED")
    assert before.keys() == host


def accumulated(
    loop: Loop, x: Tensor, y: Tensor, whole_optimizer: bool = False
) -> None:
    """Two halves, clipping of the gradients of the model or of all that the optimizer has, one step."""
    loop.optimizer.zero_grad()
    for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
        (nn.functional.cross_entropy(loop.model(part_x), part_y) / 2).backward()  # type: ignore[no-untyped-call]
    parameters = [p for group in loop.optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(
        parameters if whole_optimizer else loop.model.parameters(), 0.5
    )
    loop.optimizer.step()


@pytest.mark.parametrize("whole_optimizer", [False, True])
def test_accumulation_and_clipping_act_on_the_host_as_before(
    whole_optimizer: bool,
) -> None:
    step = partial(accumulated, whole_optimizer=whole_optimizer)
    grown = Loop(step=step).run(4)
    alone = Loop(step=step, controller=None).run(4)
    assert same(weights(grown.model), weights(alone.model))
    assert grown.run().grower.kept  # type: ignore[union-attr]


@pytest.mark.parametrize(("incubation", "step"), [("ste", None), ("shadow", shadowed)])
def test_a_loop_that_resumes_grows_on_to_the_same_bits(
    incubation: str, step: Any
) -> None:
    def begun(model: nn.Module | None = None) -> Loop:
        scheduler = lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, 14 * 4)  # noqa: E731
        return Loop(
            lambda p: torch.optim.AdamW(p, 0.01),
            model,
            make_scheduler=scheduler,
            step=step,
            incubation=incubation,
        )

    whole = begun().run()
    for cut in {"ste": (2, 11), "shadow": (4,)}[incubation]:
        first = begun().run(cut)
        saved = copy.deepcopy(
            {
                "model": first.model.state_dict(),
                "grower": first.grower.state_dict(),
                "optimizer": first.optimizer.state_dict(),
                "scheduler": first.scheduler.state_dict(),
            }
        )
        second = begun(net(seed=5))
        second.model.load_state_dict(saved["model"])
        second.grower.load_state_dict(saved["grower"])
        second.optimizer.load_state_dict(saved["optimizer"])
        second.scheduler.load_state_dict(saved["scheduler"])
        second.epoch = cut
        if cut == 4 and incubation == "shadow":  # in TRAINING
            of_seeds = [
                loop.grower.hooks.own_buffers["r0c0"].tensors()
                for loop in (first, second)
                if loop.grower
            ]
            assert all(
                torch.equal(one, other) for one, other in zip(*of_seeds, strict=True)
            )
        second.run()
        assert same(weights(second.model), weights(whole.model)), (
            f"cut after {cut} epochs"
        )
        assert [each.slots for each in second.steps] == [
            each.slots for each in whole.steps[cut:]
        ]


class DropsItsSecondLayer(Net):
    """Leaves out its second layer in every other training pass, as LayerDrop does at random."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        h = self.body[:2](x)
        return self.head(self.body[2:](h) if self.passes % 2 else h)  # type: ignore[no-any-return]


def test_a_seed_is_as_healthy_as_the_passes_that_it_takes_part_in() -> None:
    torch.manual_seed(0)
    loop = Loop(model=DropsItsSecondLayer(), sites={"r0c0": "body.2"}).run()
    assert stages(loop)[-1] == "FOSSILIZED"


def test_the_rate_of_a_seed_rises_after_planting() -> None:
    def seed_rates(loop: Loop, x: Tensor, y: Tensor) -> None:
        plain(loop, x, y)
        rates.extend(group["lr"] for group in loop.optimizer.param_groups[1:])

    rates: list[float] = []
    arguments: dict[str, Any] = {
        "step": seed_rates,
        "lr_factor": 2.0,
        "warmup_steps": 10,
    }
    Loop(lambda p: torch.optim.SGD(p, 0.1), **arguments).run(4)
    learned = [rate for rate in rates if rate > 0]
    assert learned[:8] == pytest.approx(
        [0.02] * 4 + [0.02 * step for step in (1, 2, 3, 4)]
    )
