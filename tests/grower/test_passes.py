"""Forward passes of a model in a loop."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from esper.grower.passes import PassHook

X = torch.ones(5, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, flag: bool, *, x: Tensor) -> Tensor:
        if not flag:
            raise ValueError("a user's own error")
        return self.layer(x)  # type: ignore[no-any-return]


def test_the_inputs_of_the_last_training_pass_are_known() -> None:
    model = Net()
    passes = PassHook(model)
    model(True, x=X)
    model.eval()(True, x=X[:2])
    assert passes.last is not None
    assert passes.last[0] == (True,)
    assert passes.last[1]["x"] is X
    assert passes.samples == 2


def test_work_before_the_first_pass_is_done_once() -> None:
    model, done = Net(), list[int]()
    passes = PassHook(model)
    passes.before_first = lambda: done.append(1)
    model(True, x=X)
    model(True, x=X)
    assert done == [1]


def test_a_site_that_runs_twice_in_a_pass_is_told_from_one_in_the_backward_pass() -> (
    None
):
    model, first = Net(), list[bool]()
    passes = PassHook(model)
    model.layer.register_forward_hook(lambda *_: first.append(passes.reach("r0c0")))
    model(True, x=X)
    assert passes.reach("r0c0")  # outside, as activation checkpointing does
    with pytest.raises(ValueError, match="own error"):
        model(False, x=X)
    assert passes.reach("r0c0")  # after an error, too
    model.layer.register_forward_hook(lambda *_: first.append(passes.reach("r0c0")))
    first.clear()
    model(True, x=X)
    assert first == [True, False]


def test_a_copy_has_no_part_in_the_passes_of_the_model() -> None:
    model = Net()
    passes = PassHook(model)
    copy.deepcopy(model)(True, x=X)
    assert passes.last is None
    passes.remove()
    model(True, x=X)
    assert passes.last is None
