"""Steps of wrapped optimizers, and with a GradScaler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.grower.stepping import (
    innermost,
    live_scalers,
    stepping_scaler,
    unscaling,
    unwrapped,
)
from tests.grower.loops import Loop, net, same, stages, weights


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


def test_the_scaler_that_steps_is_told_from_others() -> None:
    optimizer, parameter = sgd(), nn.Parameter(torch.ones(1))
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
    assert {id(scaler) for scaler in scalers} <= {
        id(scaler) for scaler in live_scalers()
    }
    seen: list[Any] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(stepping_scaler(scalers, optimizer))
    )
    scalers[1].scale(parameter.sum())
    optimizer.param_groups[0]["params"][0].grad = torch.ones_like(
        optimizer.param_groups[0]["params"][0]
    )
    scalers[1].step(optimizer)
    assert seen == [scalers[1]]
    assert float(unscaling(scalers[1], optimizer) or 0) == 1 / 8
    scalers[1].update()
    optimizer.step()
    assert seen[1] is None
    assert unscaling(None, optimizer) is None


def test_objects_are_searched_for_scalers_more_and_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search takes longer than an epoch of a small loop."""
    searched: list[int] = []

    def search() -> list[torch.amp.GradScaler]:
        searched.append(loop.grower.epoch)
        return []

    monkeypatch.setattr("esper.grower.stepping.live_scalers", search)
    loop = Loop()
    loop.run()
    assert searched == [0, 1, 2, 4, 8]


def test_a_loop_may_make_a_scaler_for_each_epoch() -> None:
    """Powers of two scale without rounding."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def scaled(loop: Loop, x: Tensor, y: Tensor) -> None:
        nonlocal scaler
        if loop.grower.epoch != epoch[0]:
            epoch[0] = loop.grower.epoch
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + epoch[0] % 3))
        loop.optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(loop.model(x), y)).backward()  # type: ignore[no-untyped-call]
        scaler.step(loop.optimizer)
        scaler.update()

    epoch = [0]
    assert same(weights(Loop(step=scaled).run().model), weights(Loop().run().model))


def test_a_scaler_that_is_switched_off_is_as_none() -> None:
    """As in ``GradScaler(enabled=args.amp)``; without a GPU, torch switches one for CUDA off by itself."""
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def scaled(loop: Loop, x: Tensor, y: Tensor) -> None:
        loop.optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(loop.model(x), y)).backward()  # type: ignore[no-untyped-call]
        scaler.step(loop.optimizer)
        scaler.update()

    assert same(weights(Loop(step=scaled).run().model), weights(Loop().run().model))


@pytest.mark.parametrize("clips", [False, True])
def test_seeds_learn_the_same_with_a_scaler(clips: bool) -> None:
    """Powers of two scale without rounding."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10**6)

    def scaled(loop: Loop, x: Tensor, y: Tensor) -> None:
        loop.optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(loop.model(x), y)).backward()  # type: ignore[no-untyped-call]
        if clips:
            scaler.unscale_(loop.optimizer)
            nn.utils.clip_grad_norm_(
                [p for g in loop.optimizer.param_groups for p in g["params"]], 1e6
            )
        scaler.step(loop.optimizer)
        scaler.update()

    one, two = Loop(step=scaled).run(5), Loop().run(5)
    assert stages(one)[-1] == "BLENDING"
    assert same(weights(one.model), weights(two.model))
    seeds = [
        loop.grower.hooks.sites["r0c0"].seed
        for loop in (one, two)
        if loop.grower is not None
    ]
    for mine, other in zip(seeds[0].parameters(), seeds[1].parameters(), strict=True):  # type: ignore[union-attr]
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


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

    one, two = Loop(step=scaled).run(4), Loop(step=scaled, controller=None).run(4)
    assert stages(one)[-1] == "TRAINING"
    assert same(weights(one.model), weights(two.model))
    assert scaler.get_scale() == 8
