"""Wrapped optimizers, GradScalers, and schedules that see the groups of the host only."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lr

import esper
from esper.config import ConfigError
from esper.core.action import Op
from esper.grower.stepping import (
    SLOT,
    HostGroups,
    free_labels,
    host_groups,
    in_order,
    innermost,
    label_slots,
    require_groups_apart,
    unwrapped,
)
from tests.grower.loops import (
    GROW,
    LENIENT,
    Loop,
    X,
    Y,
    net,
    same,
    scores,
    script,
    stages,
    weights,
)
from tests.selection import slow_except


class Wrapper:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD(net().parameters(), 0.1)


def test_the_optimizer_in_wrappers_is_found_and_what_is_none_is_refused() -> None:
    optimizer = sgd()
    assert unwrapped(Wrapper(Wrapper(optimizer))) is innermost(optimizer) is optimizer
    with pytest.raises(
        ConfigError, match=r"optimizer is a Linear, not a torch\.optim\.Optimizer"
    ):
        unwrapped(nn.Linear(1, 1))
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
        with pytest.raises(ConfigError, match="cannot update seeds"):
            unwrapped(kind(net().parameters(), 0.1))


def scaled_by(scaler: torch.amp.GradScaler, clips: bool = False) -> Any:
    """A step of a loop with a scaler."""

    def step(loop: Loop, x: Tensor, y: Tensor) -> None:
        loop.optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(loop.model(x), y)).backward()
        if clips:
            scaler.unscale_(loop.optimizer)
            groups = loop.optimizer.param_groups
            nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], 1e6)
        scaler.step(loop.optimizer)
        scaler.update()

    return step


def seed_of(loop: Loop) -> Any:
    return loop.grower.hooks.sites["r0c0"].seed.parameters()


def test_a_scaler_that_is_switched_off_is_as_none() -> None:
    """As in ``GradScaler(enabled=args.amp)``; without a GPU, torch switches one for CUDA off by itself."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loop = Loop(step=scaled_by(scaler), scaler=scaler).run()
    assert loop.grower.groups.scaler is None
    assert same(weights(loop.model), weights(Loop().run().model))


def test_scaled_gradients_without_the_scaler_are_said_once() -> None:
    scaler = torch.amp.GradScaler("cpu", growth_interval=10**6)
    loop = Loop(step=scaled_by(scaler))
    with pytest.warns(UserWarning, match=r"times those of .*as scaler=") as said:
        loop.run(5)
    assert len(said) == 1


def test_an_overflow_in_a_seed_that_only_learns_changes_no_bit_of_the_host() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10**6)

    def scaled(loop: Loop, x: Tensor, y: Tensor) -> None:
        loop.optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(loop.model(x), y)).backward()  # type: ignore[no-untyped-call]
        if (
            loop.grower is not None
            and (seed := loop.grower.hooks.sites["r0c0"].seed) is not None
        ):
            for parameter in seed.parameters():
                if (gradient := loop.grower.groups.gradient(parameter)) is not None:
                    gradient.fill_(torch.inf)
        scaler.step(loop.optimizer)
        scaler.update()

    one = Loop(step=scaled, scaler=scaler).run(4)
    two = Loop(step=scaled, controller=None).run(4)
    assert stages(one)[-1] == "TRAINING"
    assert same(weights(one.model), weights(two.model))
    assert scaler.get_scale() == 8


SCHEDULES: dict[str, Any] = {
    "cosine": lambda o: lr.CosineAnnealingLR(o, 60),
    "one cycle": lambda o: lr.OneCycleLR(o, 0.2, 100),
    "lambda": lambda o: lr.LambdaLR(o, [lambda t: 0.99**t]),
    "cyclic": lambda o: lr.CyclicLR(o, [0.01], [0.1], step_size_up=3),
    "chained": lambda o: lr.ChainedScheduler(
        [lr.LinearLR(o, 0.1, total_iters=4), lr.ExponentialLR(o, 0.99)]
    ),
    "sequential": lambda o: lr.SequentialLR(
        o, [lr.ConstantLR(o), lr.ExponentialLR(o, 0.99)], [5]
    ),
}


def rates(loop: Loop) -> list[float]:
    return [group["lr"] for group in loop.optimizer.param_groups]


@pytest.mark.parametrize("name", slow_except(("cyclic", "sequential"), SCHEDULES))
def test_a_schedule_goes_on_as_without_seeds_and_kept_seeds_follow(name: str) -> None:
    grown = Loop(make_scheduler=SCHEDULES[name], lr_factor=0.25)
    alone = Loop(make_scheduler=SCHEDULES[name], controller=None)
    for _ in range(grown.epochs):
        grown.run(1), alone.run(1)
        assert rates(grown)[0] == rates(alone)[0]
    grown.grower.finish()
    for _ in range(3):
        grown.train(), alone.train()
        assert rates(grown) == [rates(alone)[0], 0.25 * rates(alone)[0]]


class Own:
    """A custom schedule, not a class of torch."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.base, self.epoch = (
            optimizer,
            [group["lr"] for group in optimizer.param_groups],
            0,
        )

    def step(self) -> None:
        self.epoch += 1
        for index, group in enumerate(self.optimizer.param_groups):
            group["lr"] = self.base[index] * 0.99**self.epoch


def test_a_schedule_of_the_users_own_class_goes_on() -> None:
    loop = Loop(make_scheduler=Own).run()
    loop.grower.finish()
    loop.train()
    assert (
        rates(loop)[0]
        == rates(loop)[1]
        == pytest.approx(0.1 * 0.99 ** (4 * 15), rel=1e-2)
    )


def test_what_is_no_schedule_of_the_optimizer_is_refused_with_what_to_write() -> None:
    with pytest.raises(
        ConfigError, match=r"scheduler= is a function.*if \"slot\" not in g"
    ):
        Loop(scheduler=lambda epoch: 0.1)
    other = torch.optim.SGD(net().parameters(), 0.1)
    with pytest.raises(ConfigError, match=r"whose \.optimizer is not the optimizer"):
        Loop(scheduler=lr.ConstantLR(other))


def test_a_schedule_that_was_not_passed_is_an_error_that_says_so() -> None:
    for make in (SCHEDULES["cosine"], SCHEDULES["sequential"]):
        with pytest.raises(ConfigError, match="pass it as scheduler="):
            Loop(make_scheduler=make, scheduler=None)
    for make in (Own, lr.ReduceLROnPlateau):
        loop = Loop(make_scheduler=make, scheduler=None)
        loop.scheduler = None
        loop.train()
        loop.optimizer.param_groups[0]["lr"] = 0.05
        with pytest.raises(ConfigError, match=r"\(0\.1 to 0\.05\).*as scheduler="):
            loop.train()
        assert len(loop.optimizer.param_groups) == 1


def test_a_loop_may_set_rates_by_itself() -> None:
    loop = Loop(scheduler=())
    for epoch in range(loop.epochs):
        loop.optimizer.param_groups[0]["lr"] = 0.1 * 0.9**epoch
        loop.run(1)
    loop.train()
    assert rates(loop) == [0.1 * 0.9**13] * 2


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda view: pickle.loads(pickle.dumps(view))]
)
def test_a_view_survives_copies(copied: Any) -> None:
    optimizer = torch.optim.SGD(net().parameters(), 0.1)
    optimizer.add_param_group(
        {"params": [torch.nn.Parameter(torch.zeros(1))], SLOT: "r0c0"}
    )
    view = copied(HostGroups(optimizer))
    assert len(view.param_groups) == 1
    assert len(host_groups(view.whole)) == 1
    assert view.defaults == optimizer.defaults
    assert HostGroups(optimizer) == optimizer


def test_a_saved_state_is_put_in_the_order_of_the_groups() -> None:
    optimizer = torch.optim.SGD(net().parameters(), 0.1)
    for slot in (None, "r0c1", "r0c0"):
        group: dict[str, Any] = {"params": [torch.nn.Parameter(torch.zeros(1))]}
        optimizer.add_param_group(group if slot is None else {**group, SLOT: slot})
    state = optimizer.state_dict()
    assert in_order(optimizer, state) is None
    mixed = {**state, "param_groups": [state["param_groups"][i] for i in (2, 0, 3, 1)]}
    assert in_order(optimizer, mixed) == state
    fewer = {**state, "param_groups": state["param_groups"][:3]}
    with pytest.raises(
        ConfigError,
        match="has seeds in r0c1, and the optimizer has seeds in r0c0, r0c1",
    ):
        in_order(optimizer, fewer)


@pytest.mark.parametrize(
    ("clips", "fused"), [(False, False), (True, False), (False, True)]
)
def test_seeds_learn_the_same_with_a_scaler(clips: bool, fused: bool) -> None:
    """Powers of two scale without rounding."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, 0.01, fused=fused)

    one = Loop(adam, step=scaled_by(scaler, clips), scaler=scaler).run(5)
    two = Loop(adam).run(5)
    assert stages(one)[-1] == "BLENDING"
    pairs = zip(seed_of(one), seed_of(two), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


class ClipsAll(torch.optim.SGD):
    """Clips by the norm of all gradients, as LAMB does."""

    def step(self, closure: Any = None) -> Any:
        every = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(every, 1.0)
        return super().step(closure)


class OneRate(torch.optim.SGD):
    """Estimates a rate from all gradients that it has seen, as D-adaptation does; the first step has none."""

    def step(self, closure: Any = None) -> Any:
        seen = self.param_groups[0].get("seen", 0.0)
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + seen)
        loss = super().step(closure)
        norms = [
            float(p.grad.norm())
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        self.param_groups[0]["seen"] = seen + sum(norms)
        return loss


class Counts(torch.optim.SGD):
    """Divides by the number of its parameters, which a seed changes by being there."""

    def step(self, closure: Any = None) -> Any:
        every = [p for group in self.param_groups for p in group["params"]]
        mean = sum(
            float(p.grad.abs().sum()) for p in every if p.grad is not None
        ) / len(every)
        for parameter in every:
            parameter.grad.div_(mean)
        return super().step(closure)


@pytest.mark.parametrize("kind", [ClipsAll, OneRate, Counts])
def test_an_optimizer_with_one_number_for_all_groups_is_refused_by_trying_it(
    kind: Any,
) -> None:
    model = net()
    before = weights(model)
    with pytest.raises(
        ConfigError, match=f"a step of {kind.__name__} on a parameter group depends"
    ):
        Loop(lambda p: kind(p, 0.1), model)
    assert same(weights(model), before)


@pytest.mark.parametrize(
    "kind",
    [
        "SGD",
        "AdamW",
        "Adam",
        "RMSprop",
        "Adagrad",
        "NAdam",
        "RAdam",
        "Adamax",
        "Adafactor",
    ],
)
def test_optimizers_whose_groups_are_independent_are_taken(kind: str) -> None:
    optimizer = getattr(torch.optim, kind)(
        net().parameters(), lr=torch.tensor(0.1) if kind == "Adam" else 0.1
    )
    held, state = len(optimizer.state), torch.get_rng_state()
    require_groups_apart(optimizer)
    assert len(optimizer.state) == held
    assert torch.equal(torch.get_rng_state(), state)


def test_an_optimizer_that_cannot_be_tried_is_taken() -> None:
    class NeedsMore(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("call backward of the engine")

    require_groups_apart(NeedsMore(net().parameters(), 0.1))


def test_groups_of_seeds_belong_to_one_grower_each() -> None:
    optimizer = sgd()
    first, second, third = nn.Identity(), nn.Identity(), nn.Identity()
    assert label_slots(optimizer, first, ["r0c0"]) == {"r0c0": "r0c0"}
    assert label_slots(optimizer, second, ["r0c0", "r0c1"]) == {
        "r0c0": "r0c0 of Grower 2",
        "r0c1": "r0c1 of Grower 2",
    }
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], SLOT: "r0c0"})
    free_labels(optimizer, first)
    assert label_slots(optimizer, third, ["r0c0"]) == {"r0c0": "r0c0"}
    assert [group.get(SLOT) for group in optimizer.param_groups] == [None, "kept r0c0"]


def test_two_models_with_one_optimizer_grow_as_with_slots_of_other_names() -> None:
    """One of the two seeds is pruned; the other learns on."""
    found = []
    for name in ("r0c0", "r0c1"):
        models = [net(1), net(2)]
        optimizer = torch.optim.SGD(
            [p for model in models for p in model.parameters()], 0.1
        )
        prune = {0: GROW[0], 4: (Op.PRUNE, {"slot": "r0c0", "alpha_speed": 0})}
        grows = {
            epoch: (op, {**values, "slot": name})
            for epoch, (op, values) in GROW.items()
        }
        plans = [({"r0c0": "body.0"}, prune), ({name: "body.0"}, grows)]
        growers = []
        for model, (sites, actions) in zip(models, plans, strict=True):
            growers.append(
                esper.Grower(
                    model,
                    sites,
                    optimizer,
                    script(actions),
                    14,
                    topology="mlp",
                    config=LENIENT,
                )
            )
        for _ in range(12):
            for model in models:
                model.train()
            optimizer.zero_grad()
            sum(nn.functional.cross_entropy(model(X), Y) for model in models).backward()  # type: ignore[union-attr]
            optimizer.step()
            for grower in growers:
                grower.step(scores)
        [kept] = growers[1].groups.groups.values()
        found.append([p.detach().clone() for p in kept["params"]])
        assert growers[1].kept
        assert not growers[0].groups.groups
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
