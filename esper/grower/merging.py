"""Merging in a loop that goes on: kept seeds become parts of the layers, and the optimizer's state goes with them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.hosts.seed_hook import hooks_of
from esper.hosts.widen import GrownInModel, merge_all, merge_sources
from esper.seeds.blueprints.source import RANKS

POWERS = {
    "momentum_buffer": 1,
    "exp_avg": 1,
    "grad_avg": 1,
    "exp_avg_sq": 2,
    "max_exp_avg_sq": 2,
    "sum": 2,
    "square_avg": 2,
}
"""The power of the gradient that a state of torch's optimizers averages, by its name."""


def merge_in_loop(
    model: nn.Module,
    optimizer: Optimizer,
    difference: Callable[[], str | None],
) -> dict[str, str]:
    """Merges the kept seeds of ``model``, and puts the new parameters in the place of the old ones in ``optimizer``.

    Averages of gradients are put together as the parameters are: a merged layer goes on as the layer and the seed would
    have. A layer that takes up a LoRA keeps its own. Where the state of a changed parameter is something else, such as
    the factors of Adafactor or the weights of schedule-free, it starts anew. ``difference`` is that of
    :func:`merge_all`.

    Returns the reason for each seed that stays, by path.
    """
    before = dict(model.named_parameters())
    versions = {parameter: parameter._version for parameter in before.values()}
    averages = POWERS.keys() & chain.from_iterable(optimizer.state.values())
    twins = {key: _twin(model, optimizer, key) for key in averages}
    reasons = merge_all(model, difference)
    states = {}
    for key, twin in twins.items():
        merge_sources(GrownInModel(twin), lambda: None, stay=reasons)
        states[key] = dict(twin.named_parameters())
    new_for: dict[nn.Parameter, nn.Parameter] = {}
    for name, new in model.named_parameters():
        old = before.pop(name, None)
        if old is None:
            group = _group_of(optimizer, model, name)
            group["params"].append(new)
            if "param_names" in group:
                group["param_names"].append(name)
        elif old is not new:
            new_for[old] = new
            values = {key: twin_parameters[name].data for key, twin_parameters in states.items()}
            _move_state(optimizer, old, new, values)
        elif new._version != versions[old] and not _averages_gradients(optimizer, old):
            optimizer.state.pop(old, None)
    gone = set(before.values())  # all parameters of a merged seed, which make up its group
    groups = []
    for group in optimizer.param_groups:
        if gone.isdisjoint(group["params"]):
            group["params"][:] = [new_for.get(p, p) for p in group["params"]]
            groups.append(group)
    optimizer.param_groups[:] = groups
    for parameter in gone:
        optimizer.state.pop(parameter, None)
    return reasons


def _group_of(optimizer: Optimizer, model: nn.Module, name: str) -> dict[str, Any]:
    """Returns the group of the layer of a new parameter, such as the bias of a layer that had none."""
    layer = model.get_submodule(name.rpartition(".")[0])
    of_layer = set(layer.parameters(recurse=False))
    for group in optimizer.param_groups:
        if not of_layer.isdisjoint(group["params"]):
            return group
    return optimizer.param_groups[0]


def _move_state(
    optimizer: Optimizer,
    old: nn.Parameter,
    new: nn.Parameter,
    values: Mapping[str, Tensor],
) -> None:
    """Gives ``new`` the state of ``old``, with ``values`` in place of what has the shape of the parameter."""
    averages = _averages_gradients(optimizer, old)
    state = optimizer.state.pop(old, {})
    if not averages:
        return
    for key, value in state.items():
        optimizer.state[new][key] = values[key].to(value.dtype) if _is_like(value, old) else value


def _averages_gradients(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether the state of ``parameter`` consists of numbers, and of known averages of its gradients."""
    for key, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        if key not in POWERS or not _is_like(value, parameter):
            return False
    return True


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and parameter.dim() > 0 and value.shape == parameter.shape


@torch.no_grad()
def _twin(model: nn.Module, optimizer: Optimizer, key: str) -> nn.Module:
    """Returns a copy of ``model`` whose parameters are those values of the optimizer's state.

    Merged layers count a seed's last weights alpha times, so that the gradient for them is 1/alpha of what it was.
    """
    twin = copy.deepcopy(model)
    for average, parameter in zip(twin.parameters(), model.parameters(), strict=True):
        value = optimizer.state.get(parameter, {}).get(key)
        if _is_like(value, parameter):
            average.copy_(value)
        else:
            average.zero_()
    for _, _, hook in hooks_of(twin):
        if hook.frame is None:
            continue
        hook.alpha = hook.alpha ** -POWERS[key] if hook.alpha else 0.0
        if hook.recipe.get("blueprint") in RANKS and hook.seed is not None:
            for parameter in hook.seed.parameters():
                parameter.zero_()
    return twin
