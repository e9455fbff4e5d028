"""A loop grows the same network whatever its process has set for torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch

from esper import find_sites
from esper.agents.advisor import shipped
from esper.core.action import Op
from tests.agents.test_advisor import facts
from tests.grower.loops import (
    GROW,
    Loop,
    X,
    do,
    net,
    plant,
    same,
    scores,
    script,
    weights,
)
from tests.ops.test_torch_state import STATES, state_of_torch

MERGES = {
    0: plant("r0c0", "lora"),
    1: do(Op.ADVANCE, "r0c0"),
    4: do(Op.ADVANCE, "r0c0"),
    8: do(Op.ADVANCE, "r0c0"),
    9: do(Op.FOSSILIZE, "r0c0"),
}
each = pytest.mark.parametrize("state", STATES)


def grown(
    around: Callable[[], AbstractContextManager[Any]],
    merge: bool = False,
    **arguments: Any,
) -> dict[str, torch.Tensor]:
    """The weights that a loop ends with, and trains on with, if what it calls of the Grower is called in a state."""
    loop = Loop(controller=script(MERGES if merge else GROW), **arguments)
    for _ in range(11):
        loop.train()
        with around():
            before = state_of_torch()
            loop.grower.step(scores)
            assert state_of_torch() == before
    with around():
        model = loop.grower.finish(merge=merge, quiet=True)
    loop.grower = None
    loop.train()
    assert not any(p.is_inference() for p in model.parameters())
    return weights(model)


@cache
def undisturbed(merge: bool) -> dict[str, torch.Tensor]:
    return grown(nullcontext, merge)


@pytest.mark.parametrize(
    ("state", "merge"),
    [(state, number % 2 == 1) for number, state in enumerate(STATES)],
)
def test_steps_in_any_state_grow_the_same_network(state: str, merge: bool) -> None:
    assert same(grown(STATES[state], merge), undisturbed(merge))


@each
def test_a_loop_goes_on_from_its_state_in_any_state(state: str) -> None:
    loop = Loop()
    for _ in range(6):
        loop.train()
        loop.grower.step(scores)
    states = [
        loop.grower.state_dict(),
        loop.model.state_dict(),
        loop.optimizer.state_dict(),
    ]
    saved = copy.deepcopy(states)
    again = Loop()
    again.epoch = loop.epoch
    with STATES[state]():
        again.grower.load_state_dict(saved[0])
    again.model.load_state_dict(saved[1])
    again.optimizer.load_state_dict(saved[2])
    for going in (loop, again):
        going.train()
        going.grower.step(scores)
    assert same(weights(loop.model), weights(again.model))


@each
def test_sites_and_the_advisor_are_the_same_in_any_state(state: str) -> None:
    model, example = net(), X[:4]
    wanted = [str(site) for site in find_sites(model, example)]
    known = facts(16)
    gains = shipped().gains(known)
    shipped.cache_clear()
    with STATES[state]():
        assert [str(site) for site in find_sites(model, example)] == wanted
        assert (shipped().gains(known) == gains).all()
    assert (shipped().gains(known) == gains).all()
