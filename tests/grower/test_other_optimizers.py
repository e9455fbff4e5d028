"""Optimizers beside that of a Grower: what they train is not merged, and they are watched no longer than needed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    register_optimizer_step_post_hook,
)

import esper.grower.merging as merges
from tests.grower.loops import Loop, net, plant
from tests.grower.test_merging import merging, whole_batch


def with_another(
    other: torch.optim.Optimizer,
    merge: bool,
    model: nn.Module,
    steps: bool = True,
    dims: tuple[int, ...] = (1,),
) -> Loop:
    """A loop whose batches ``other`` steps, too; its own optimizer has the parameters of ``dims``."""

    def step(loop: Loop, x: Tensor, y: Tensor) -> None:
        other.zero_grad()
        whole_batch(loop, x, y)
        if steps:
            other.step()

    return merging(
        {1: plant("r2c0", "widen_half")},
        model=model,
        merge=merge,
        step=step,
        make_optimizer=lambda p: torch.optim.SGD(
            [q for q in p if q.dim() in dims], 0.1
        ),
    )


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.Muon(matrices(model), 0.01),
        lambda model: torch.optim.SGD(matrices(model), 0.01, momentum=0.9),
        lambda model: torch.optim.Adam(model.body[2].parameters(), 1e-4),
    ],
    ids=["Muon", "SGD", "Adam"],
)
def test_a_layer_that_another_optimizer_steps_is_not_merged_at_the_end(
    make: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    model = net()
    other = make(model)
    loop = with_another(other, False, model).run()
    kind = type(other).__name__
    with pytest.warns(UserWarning, match=rf"stay modules: .*{kind}, beside .*weight"):
        network = loop.grower.finish(merge=True)
    held = other.param_groups[0]["params"]
    before = [parameter.detach().clone() for parameter in held]
    loop.grower = None
    loop.epochs += 1
    loop.run()
    assert set(held) <= set(network.parameters())
    assert not any(torch.equal(old, new) for old, new in zip(before, held, strict=True))


def test_a_layer_that_two_optimizers_step_keeps_the_seed_beside() -> None:
    model = net()
    others = torch.optim.Adam(model.parameters(), 1e-4)

    def step(loop: Loop, x: Tensor, y: Tensor) -> None:
        whole_batch(loop, x, y)
        others.step()

    loop = merging({1: plant("r2c0", "widen_half")}, model=model, step=step).run()
    assert loop.steps[-1].slots["r2c0"].stays.startswith("Adam, beside")


def test_an_optimizer_that_does_not_step_or_steps_something_else_hinders_no_merge() -> (
    None
):
    model = net()
    for parameters, steps in (
        (matrices(model), False),
        (nn.Linear(2, 2).parameters(), True),
    ):
        other = torch.optim.Adam(parameters)
        network = (
            with_another(other, False, model, steps, (1, 2)).run().grower.finish(True)
        )
        assert network.body[0].out_features == 18
        model = net()


def test_a_layer_that_no_optimizer_has_is_not_merged_at_the_end() -> None:
    """Its new units would stop learning if the training goes on."""
    other = torch.optim.Adam(nn.Linear(2, 2).parameters())
    loop = with_another(other, False, net()).run()
    with pytest.warns(UserWarning, match=r"body.*weight is not in the Grower's optim"):
        network = loop.grower.finish(merge=True)
    assert network.body[0].out_features == 12


def test_one_watch_of_optimizers_ends_with_the_last_grower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(merges, "_WATCHES", WeakSet())  # without those of other tests
    monkeypatch.setattr(merges, "_HOOKS", [])
    hooks = _global_optimizer_post_hooks
    before = len(hooks)
    loops = [merging() for _ in range(2)]
    assert len(hooks) == before + 1
    loops[0].grower.close()
    assert len(hooks) == before + 1
    loops[1].run(2)
    loops[1].grower.finish()
    assert len(hooks) == before


def test_a_grower_may_be_collected_within_a_step_of_any_optimizer() -> None:
    loops = []

    def collect(*_step: Any) -> None:
        loops.clear()
        gc.collect()

    handle = register_optimizer_step_post_hook(collect)
    loops.append(merging())
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    torch.optim.Adam(layer.parameters()).step()
    handle.remove()
    assert not loops
