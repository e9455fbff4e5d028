"""The end of growth: kept seeds become parts of the model, and of the averages of its weights."""

from __future__ import annotations

import copy
import warnings

from torch import Tensor
from torch.optim import Optimizer

from esper.grower.averages import averages_made_since
from esper.grower.hooks import GrowingSite, SiteHooks
from esper.grower.merging import merge_in_loop
from esper.hosts.compare import coarsest_dtype, difference
from esper.hosts.example import cloned, outputs_for
from esper.hosts.pretrained import note_seeds
from esper.hosts.seed_hook import container_of, drop_container, keep, unregister
from esper.hosts.widen import merge_all


def finish(hooks: SiteHooks, optimizer: Optimizer | None = None) -> dict[str, str]:
    """Makes the kept seeds parts of the model, and of the averages that follow it, and removes all other hooks.

    The model's outputs for the last training batch are compared, in eval mode: the model computes what it did. With the
    model's ``optimizer``, seeds become parts of the layers, see :func:`merge_in_loop`.

    Returns the reason for each seed that cannot, by path. Raises RuntimeError if the model would compute something
    else; it then grows on as before.
    """
    for network in averages_made_since(hooks.origin):
        if network not in hooks.networks:
            hooks.follow(network)
    before = _outputs(hooks)
    for growing in hooks.growing:
        _settle(hooks, growing)
    after = None if before is None else _outputs(hooks)
    found = None if before is None or after is None else difference(before, after)
    if found is not None:
        for growing in hooks.growing:
            _unsettle(growing)
        raise RuntimeError(
            f"the model would compute something else with its kept seeds as parts of it ({found}): it probably "
            "runs or counts its submodules by itself. It keeps growing as before, and nothing is lost"
        )
    reasons = {} if optimizer is None else _merge(hooks, optimizer, before)
    for network in hooks.networks:
        drop_container(network)
        note_seeds(network)
    hooks.passes.remove()
    hooks.growing.clear()
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


def _settle(hooks: SiteHooks, growing: GrowingSite) -> None:
    """Makes the seed at a site part of its network if it is kept; removes its hook otherwise."""
    hook = growing.hook
    site = hooks.sites.get(growing.name)
    container_of(growing.model).growing.pop(hook.name)
    if site is None or not site.fossil or site.planted is None:
        unregister(growing.model, hook)
        return
    hook.recipe = growing.recipe()
    seed = site.planted.module
    if growing.model is not hooks.model:
        seed = copy.deepcopy(seed)
    keep(growing.model, hook, seed, site.alpha)


def _unsettle(growing: GrowingSite) -> None:
    """Undoes :func:`_settle` where a seed is kept; there is no other one."""
    container = container_of(growing.model)
    container._modules.pop(growing.hook.name, None)
    container.growing[growing.hook.name] = growing
    growing.hook.growth = growing
