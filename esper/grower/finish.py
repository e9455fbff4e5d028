"""The end of growth: kept seeds become parts of the model and of its averages, or of the layers and the optimizer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from esper.grower.sites import SiteHooks
from esper.hosts.container import release
from esper.hosts.example import cloned, coarsest_dtype, difference, outputs_for
from esper.hosts.moments import POWERS, Averages, is_like, merged_averages
from esper.hosts.seed_hook import COPIES, SeedHook, keep, unregister
from esper.hosts.seed_state import note_seeds
from esper.hosts.widen import changed_by, merge_all, seeds_of_model


def warn_of_copies(hooks: SiteHooks) -> None:
    """Warns of copies of the model that were made while it grew, and lack seeds that it has kept."""
    lacking = set()
    for hook in COPIES[hooks.origin]:
        site = hooks.sites.get(hook.slot)
        if hook.growth is None and hook.seed is None and site is not None and site.fossil:
            lacking.add(hook.slot)
    if lacking:
        warnings.warn(
            f"a copy of the model that was made while it grew has no seed in slot {', '.join(sorted(lacking))}: if it "
            "is an average of the weights, pass it to grower.follow() when it is made",
            stacklevel=4,
        )


def finish(hooks: SiteHooks, optimizer: Optimizer | None = None) -> dict[str, str]:
    """Makes the kept seeds parts of the model, and of the averages that follow it, and removes all other hooks.

    The model's outputs for the last training batch are compared, in eval mode: the model computes what it did. With the
    model's ``optimizer``, seeds become parts of the layers, see :func:`merge_in_loop`.

    Returns the reason for each seed that cannot, by path. Raises RuntimeError if the model would compute something
    else; it then grows on as before.
    """
    warn_of_copies(hooks)
    before = _outputs(hooks)

    def attach() -> None:
        for network, hook in hooks.hooks:
            _attach(hooks, network, hook)

    def changed() -> str | None:
        after = None if before is None else _outputs(hooks)
        return None if before is None or after is None else difference(before, after)

    found = changed_by(nn.ModuleList(hooks.networks), attach, changed)
    if found is not None:
        for _, hook in hooks.hooks:
            hook.growth = hooks
        raise RuntimeError(
            f"finish() was rolled back: adding the kept seeds changes the model's output ({found}). The model probably "
            "iterates over its own submodules. Training can continue"
        )
    reasons = {} if optimizer is None else _merge(hooks, optimizer, before)
    for network in hooks.networks:
        note_seeds(network)
    hooks.end()
    return reasons


def _merge(
    hooks: SiteHooks,
    optimizer: Optimizer,
    before: list[Tensor] | None,
) -> dict[str, str]:
    """Makes the kept seeds parts of the layers of all networks, if the model's outputs stay those ``before``."""
    rounding = coarsest_dtype(hooks.model)

    def changed() -> str | None:
        after = _outputs(hooks)
        if before is None or after is None:
            return "its outputs cannot be compared"
        return difference(before, after, rounding)

    reasons = merge_in_loop(hooks.model, optimizer, changed)
    for network in hooks.networks:
        if network is not hooks.model:
            merge_all(network, lambda: None, stay=reasons)
    return reasons


def _outputs(hooks: SiteHooks) -> list[Tensor] | None:
    """Returns the tensors that the model returns for the last training batch in eval mode.

    None without a batch, and with a warning if the model cannot run on it in eval mode.
    """
    if hooks.passes.last is None:
        return None
    try:
        return outputs_for(hooks.model, *cloned(hooks.passes.last))
    except Exception as error:  # whatever a user's model or its arguments run into
        warnings.warn(
            f"the model was not compared before and after growth, because it cannot run on its last batch: {error}",
            stacklevel=4,
        )
        return None


def _attach(hooks: SiteHooks, network: nn.Module, hook: SeedHook) -> None:
    """Makes the seed of a hook part of its network if it is kept; removes the hook otherwise."""
    site = hooks.sites.get(hook.slot)
    release(network, hook)
    if site is None or not site.fossil or site.planted is None:
        unregister(network, hook)
        return
    hook.recipe = hooks.present(hook.slot)[2]
    seed = site.planted.module
    if hook.in_average:
        seed = copy.deepcopy(seed)
    keep(network, hook, seed, site.alpha)


def merge_in_loop(
    model: nn.Module,
    optimizer: Optimizer,
    difference: Callable[[], str | None],
) -> dict[str, str]:
    """Merges the kept seeds of ``model``, and puts the new parameters in the place of the old ones in ``optimizer``.

    Averages of gradients are put together as the parameters are, corrected to the layer's count of steps: a merged
    layer goes on as the layer and the seed would have. A layer that takes up a LoRA keeps its own. Where the state of a
    changed parameter is something else, such as the factors of Adafactor or the weights of schedule-free, it starts
    anew. ``difference`` is that of :func:`merge_all`.

    Returns the reason for each seed that stays, by path.
    """
    before = dict(model.named_parameters())
    merge_averages = merged_averages(model, seeds_of_model, Averages([optimizer]))
    reasons = merge_all(model, difference)
    averages = merge_averages(reasons)
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
            values = {key: of_parameters[name] for key, of_parameters in averages.items()}
            _move_state(optimizer, old, new, values)
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
        optimizer.state[new][key] = values[key].to(value.dtype) if is_like(value, old) else value


def _averages_gradients(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether the state of ``parameter`` consists of numbers, and of known averages of its gradients."""
    for key, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        if key not in POWERS or not is_like(value, parameter):
            return False
    return True
