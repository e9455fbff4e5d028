"""Layers that change each element of their input by itself, such as activations of any library."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from esper.core.blend import CONTAINER, GROWING
from esper.ops.torch_state import training_state

ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid)
"""Layers that need not be tried out to know that they are elementwise."""


@training_state()
@torch.no_grad()
def is_elementwise(layer: nn.Module) -> bool:
    """Tries whether each element of the output of ``layer`` depends on that element of its input only, as in
    activations of any library. Layers that have weights or draw random numbers are not elementwise."""
    if type(layer) in ACTIVATIONS and not layer._forward_hooks and not layer._forward_pre_hooks:
        return True
    if next(layer.parameters(), None) is not None or next(layer.buffers(), None) is not None:
        return False
    values = torch.linspace(-3, 3, 24, dtype=torch.float64)
    try:
        evaluated = bare_copy(layer).eval()
        training = bare_copy(layer).train()
        one_by_one = torch.cat([evaluated(value.clone().view(1, 1)).flatten() for value in values])
        outputs = []
        for layer_of_mode in (evaluated, training):
            for shape in ((4, 6), (2, 3, 2, 2)):
                output = layer_of_mode(values.clone().view(shape))
                outputs.append((output, shape))
    except Exception:  # a user's layer may need anything
        return False
    for output, shape in outputs:
        fits = isinstance(output, Tensor) and output.shape == shape
        if not fits or not torch.allclose(output.flatten(), one_by_one):
            return False
    return True


def bare_copy(layer: nn.Module) -> nn.Module:
    """Returns a copy of a layer without the seeds that a network has there, and their hooks; a user's hooks stay."""
    copied = copy.deepcopy(layer)
    for module in copied.modules():
        vars(module).pop(GROWING, None)
        module._modules.pop(CONTAINER, None)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number, hook in list(hooks.items()):
                if _is_of_this_package(hook):
                    del hooks[number]
    return copied


def _is_of_this_package(hook: Callable[..., Any]) -> bool:
    """Returns whether a hook is a function, a method or an object of Esper's, by where its code lies."""
    if isinstance(hook, partial):
        hook = hook.func
    owner = getattr(hook, "__self__", hook)
    return str(owner.__module__).partition(".")[0] == __name__.partition(".")[0]
