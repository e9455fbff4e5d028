"""Merging in a loop that goes on: kept seeds become parts of the layers, and the optimizer's state goes with them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.hosts.seed_hook import SeedHook, hooks_of
from esper.hosts.widen import GrownInModel, merge_all, merge_sources
from esper.seeds.blueprints.source import RANKS

POWERS = {
    **dict.fromkeys(("momentum_buffer", "exp_avg", "grad_avg"), 1),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg"), 2),
}
"""The power of the gradient that a state of torch's optimizers averages, by its name."""


def merge_in_loop(model: nn.Module, optimizer: Optimizer, difference: Callable[[], str | None]) -> dict[str, str]:
    """Merges the kept seeds of ``model``, and puts the new parameters in the place of the old ones in ``optimizer``.

    Averages of gradients are put together as the parameters are: a merged layer goes on as the layer and the seed would
    have. A layer that takes up a LoRA keeps its own. Where the state of a changed parameter is something else, such as
    the factors of Adafactor or the weights of schedule-free, it starts anew. ``difference`` is that of
    :func:`merge_all`.

    Returns the reason for each seed that stays, by path.
    """
    before = dict(model.named_parameters())
    versions = {parameter: parameter._version for parameter in before.values()}
    twins = {key: _twin(model, optimizer, key) for key in _state_keys(optimizer)}
    reasons = merge_all(model, difference)
    for twin in twins.values():
        merge_sources(GrownInModel(twin), lambda: None, stay=reasons)
    states = {key: dict(twin.named_parameters()) for key, twin in twins.items()}
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
            _move_state(optimizer, old, new, {key: named[name].data for key, named in states.items()})
        elif new._version != versions[old] and not _averages_gradients(optimizer, old):
            optimizer.state.pop(old, None)
    gone = set(before.values())  # all parameters of a merged seed, which make up its group
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if gone.isdisjoint(group["params"])]
    for group in optimizer.param_groups:
        group["params"][:] = [new_for.get(p, p) for p in group["params"]]
    for parameter in gone:
        optimizer.state.pop(parameter, None)
    return reasons


def _group_of(optimizer: Optimizer, model: nn.Module, name: str) -> dict[str, Any]:
    """Returns the group of the layer of a new parameter, such as the bias of a layer that had none."""
    layer = model.get_submodule(name.rpartition(".")[0])
    own = {id(p) for p in layer.parameters(recurse=False)}
    groups = optimizer.param_groups
    return next((group for group in groups if any(id(p) in own for p in group["params"])), groups[0])


def _move_state(optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter, values: Mapping[str, Tensor]) -> None:
    """Gives ``new`` the state of ``old``, with ``values`` in place of what has the shape of the parameter."""
    averages = _averages_gradients(optimizer, old)
    state = optimizer.state.pop(old, {})
    if not averages:
        return
    for key, value in state.items():
        optimizer.state[new][key] = values[key].to(value.dtype) if _is_like(value, old) else value


def _averages_gradients(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether the state of ``parameter`` consists of numbers, and of known averages of its gradients."""
    tensors = {key: v for key, v in optimizer.state.get(parameter, {}).items() if isinstance(v, Tensor) and v.dim() > 0}
    return all(key in POWERS and _is_like(value, parameter) for key, value in tensors.items())


def _state_keys(optimizer: Optimizer) -> set[str]:
    """Returns the names of the averages that some parameter has."""
    return {key for state in optimizer.state.values() for key in state if key in POWERS}


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and parameter.dim() > 0 and value.shape == parameter.shape


@torch.no_grad()
def _twin(model: nn.Module, optimizer: Optimizer, key: str) -> nn.Module:
    """Returns a copy of ``model`` whose parameters are those values of the optimizer's state.

    Merged layers count a seed's last weights alpha times, so that the gradient for them is 1/alpha of what it was.
    """
    twin = copy.deepcopy(model)
    for mine, parameter in zip(twin.parameters(), model.parameters(), strict=True):
        value = optimizer.state.get(parameter, {}).get(key)
        mine.copy_(value) if _is_like(value, parameter) else mine.zero_()
    for hook in _source_hooks(twin):
        hook.alpha = hook.alpha ** -POWERS[key] if hook.alpha else 0.0
        if hook.recipe.get("blueprint") in RANKS and hook.seed is not None:
            for parameter in hook.seed.parameters():
                parameter.zero_()
    return twin


def _source_hooks(model: nn.Module) -> Iterator[SeedHook]:
    for _, _, hook in hooks_of(model):
        if hook.frame is not None:
            yield hook
