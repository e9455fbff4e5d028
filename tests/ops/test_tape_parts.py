"""Parts of tapes: what a module has written once is copied as if it had been written again."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from esper.ops.tape import Tape, Unsupported
from esper.ops.tape_parts import Parts
from esper.training import native_layers  # noqa: F401  registers Esper's layers


class Doubled(nn.Sequential):
    """A module that a tape takes for no layer of torch."""


def block() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 3, 3, padding=1, bias=False),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 3, 1),
        nn.GroupNorm(3, 3),
        nn.Tanh(),
    )


def written(tape: Tape) -> list[object]:
    tensors = [id(tensor) for tensor in tape.tensors]
    return [tape.code, tape.shapes, tape.constants, tensors, tape.learns]


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_known_part_is_written_as_the_module_itself(evaluates: bool) -> None:
    first = block()
    second = block()
    parts = Parts()
    tapes = []
    for copied in (False, True, True):
        tape = Tape((3, 5, 5))
        tape.evaluates = evaluates
        if evaluates:
            tape.learning = ()
        value = 0
        for module in (first, second):
            value = (
                parts.write(tape, module, value) if copied else tape.add(module, value)
            )
        tapes.append([value, *written(tape)])
    assert tapes[0] == tapes[1] == tapes[2]


def test_another_shape_is_another_part() -> None:
    module = block()
    parts = Parts()
    for size in (5, 4):
        tape = Tape((3, size, size))
        parts.write(tape, module, 0)
        assert tape.shapes[-1] == (3, size, size)


def test_buffers_are_those_that_the_module_has_when_it_is_written() -> None:
    module = block()
    parts = Parts()
    parts.write(Tape((3, 5, 5)), module, 0)
    lent = torch.full((3,), 7.0)
    module[1]._buffers["running_mean"] = lent
    tape = Tape((3, 5, 5))
    parts.write(tape, module, 0)
    assert any(tensor is lent for tensor in tape.tensors)


def test_a_parameter_that_no_longer_learns_gets_no_gradient() -> None:
    module = block()
    parts = Parts()
    parts.write(Tape((3, 5, 5)), module, 0)
    module.requires_grad_(False)
    tape = Tape((3, 5, 5))
    parts.write(tape, module, 0)
    assert not any(tape.learns)


def test_a_part_that_learns_comes_once_on_a_tape() -> None:
    module = block()
    parts = Parts()
    tape = Tape((3, 5, 5))
    value = parts.write(tape, module, 0)
    with pytest.raises(Unsupported, match="several layers share"):
        parts.write(tape, module, value)


def test_what_has_no_compiled_form_is_refused_each_time() -> None:
    parts = Parts()
    module = Doubled(nn.ReLU())
    for _ in range(2):
        with pytest.raises(Unsupported, match="Doubled has no compiled form"):
            parts.write(Tape((3, 5, 5)), module, 0)


def test_a_module_without_a_layer_is_its_input() -> None:
    parts = Parts()
    module = nn.Identity()
    tape = Tape((3, 5, 5))
    for _ in range(2):
        assert parts.write(tape, module, 0) == 0
    assert not tape.code


def test_a_hook_that_comes_later_is_named() -> None:
    module = block()
    parts = Parts()
    parts.write(Tape((3, 5, 5)), module, 0)
    module[2].register_forward_hook(lambda *_: None)
    with pytest.raises(Unsupported, match="a ReLU with hooks"):
        parts.write(Tape((3, 5, 5)), module, 0)


def test_a_layer_that_was_exchanged_is_written_anew() -> None:
    module = block()
    parts = Parts()
    parts.write(Tape((3, 5, 5)), module, 0)
    module[3] = nn.Conv2d(3, 4, 1)
    module[4] = nn.GroupNorm(2, 4)
    copied, added = Tape((3, 5, 5)), Tape((3, 5, 5))
    parts.write(copied, module, 0)
    added.add(module, 0)
    assert written(copied) == written(added)


def test_parts_keep_no_module() -> None:
    module = block()
    parts = Parts()
    parts.write(Tape((3, 5, 5)), module, 0)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None
