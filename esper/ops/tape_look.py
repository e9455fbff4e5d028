"""Shows what happens within a pass over a tape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from esper.ops import _native
from esper.ops.tape import Program

_look = _native.writing(torch.ops.esper.tape_look_.default)

_native.not_differentiable("tape_look_", in_place=True)


def look(
    program: Program,
    x: Tensor,
    values: Sequence[int],
    numbers: Sequence[Tensor] = (),
    output_gradient: Tensor | None = None,
    gradients: Sequence[Tensor] = (),
) -> Tensor:
    """Runs a batch in training, as ``Program.run`` does, and shows values within the pass.

    Args:
        program: the network.
        x: inputs [B, ...].
        values: numbers of the values.
        numbers: are filled with the values, [B, C, H, W] each; none: they are not wanted.
        output_gradient: of the output, [B, C, H, W]; None: there is no pass backward.
        gradients: are filled with the gradients of the values, likewise.

    Returns:
        the output [B, C, H, W].
    """
    output = x.new_empty((len(x), *program.output_shape))
    _look(
        *program.arguments,
        x.detach().contiguous(),
        output,
        None if output_gradient is None else output_gradient.contiguous(),
        None,
        True,
        list(values),
        list(numbers),
        list(gradients),
    )
    return output
