"""Values within a pass over a tape, and their gradients, beside those of PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from esper.ops.tape import Tape
from esper.ops.tape_look import look


def test_values_within_a_pass_can_be_seen_with_their_gradients() -> None:
    first, norm, last = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 2)
    x = torch.randn(5, 2, 6, 6)
    between = first(x)
    read = norm(between)
    expected = last(read)
    gradient = torch.randn(expected.shape)
    wanted = torch.autograd.grad(expected, [between, read], gradient)

    tape = Tape((2, 6, 6))
    values = [tape.add(first, 0)]
    values.append(tape.add(norm, values[0]))
    tape.add(last, values[1])
    numbers = [torch.empty_like(between), torch.empty_like(read)]
    gradients = [torch.empty_like(between), torch.empty_like(read)]
    program = tape.program()
    look(program, x, values, numbers, gradient, gradients)
    for found, of_torch in zip(
        [*numbers, *gradients], [between, read, *wanted], strict=True
    ):
        torch.testing.assert_close(found, of_torch.detach(), rtol=1e-4, atol=1e-5)

    with pytest.raises(RuntimeError, match="there is no value 9"):
        look(program, x, [9], numbers[:1])
    with pytest.raises(RuntimeError, match="one tensor for each value"):
        look(program, x, values, numbers[:1])


def test_a_value_that_is_only_in_registers_cannot_be_seen() -> None:
    layers = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2))
    tape = Tape((3, 4, 4))
    tape.add(layers, 0)
    with pytest.raises(RuntimeError, match="only in registers"):
        look(tape.program(), torch.randn(4, 3, 4, 4), [1], [torch.empty(4, 3, 4, 4)])
