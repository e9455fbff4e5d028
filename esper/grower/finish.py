"""The end of growth: kept seeds become parts of the model and of its averages, or of the layers and the optimizer."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from esper.core.blueprints.adapted import merge_adapters
from esper.grower.env import require_open
from esper.grower.merging import OptimizerWatch, merge_in_loop
from esper.grower.sites import SiteHooks, outputs_of_last
from esper.grower.summary import env_of, summary_of
from esper.hosts.container import release
from esper.hosts.example import coarsest_dtype, difference
from esper.hosts.merge import merge_all, warn_unmerged
from esper.hosts.seed_hook import COPIES, SeedHook, hooks_of, keep, unregister
from esper.hosts.seed_state import note_seeds
from esper.hosts.widen import changed_by, same_parameters
from esper.ops.torch_state import outside_inference

if TYPE_CHECKING:
    from esper.grower.grower import Grower


@outside_inference()
def end_growth(grower: Grower, optimizer: Optimizer | None) -> None:
    """Ends the growth of a loop, for :meth:`Grower.finish`; with an ``optimizer``, seeds become parts of the layers.

    Raises RuntimeError if the loop never stepped.
    """
    require_open(grower.groups)
    summary = summary_of(grower)
    env = env_of(grower)
    env.backend.host.drop_unkept()
    reasons = finish(grower.hooks, optimizer, grower.merger.watch)
    env.close()
    parameters = sum(p.numel() for p in grower.model.parameters())
    grower.record.summary = replace(summary, parameters=parameters)
    if grower.log is not None:
        grower.log.finish(env, parameters)
    warn_unmerged(reasons)  # last, as warnings may be errors


def discard(grower: Grower) -> None:
    """Removes all seeds and hooks of a loop from its model and its optimizer; does nothing after the end of growth."""
    if grower.groups.closed:
        return
    for site in grower.hooks.sites.values():
        if site.seed is not None:
            site.remove()
            grower.groups.remove(site.name)
    grower.hooks.remove()
    grower.groups.close()
    grower.merger.close()
    if grower.log is not None:
        grower.log.claim.close()


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


def finish(
    hooks: SiteHooks,
    optimizer: Optimizer | None = None,
    watch: OptimizerWatch | None = None,
) -> dict[str, str]:
    """Makes the kept seeds parts of the model, and of the averages that follow it, and removes all other hooks.

    The model's outputs for the last training batch are compared, in eval mode: the model computes what it did. With the
    model's ``optimizer``, seeds become parts of the layers, see :func:`merge_in_loop`, if no other one in ``watch`` has
    stepped these.

    Returns the reason for each seed that cannot, by path. Raises RuntimeError if the model would compute something
    else; it then grows on as before.
    """
    warn_of_copies(hooks)
    _require_present(hooks)
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
            "iterates over its own submodules. Training can continue; grower.close() gives the model without its seeds"
        )
    reasons = {} if optimizer is None else _merge(hooks, optimizer, before, watch)
    for network in hooks.networks:
        note_seeds(network)
    if watch is not None:
        watch.stop()
    hooks.end()
    return reasons


def _require_present(hooks: SiteHooks) -> None:
    """Raises RuntimeError if the submodule of a kept seed is no longer in its network."""
    for network in hooks.networks:
        present = {id(hook) for _, _, hook in hooks_of(network)}
        for of_network, hook in hooks.hooks:
            site = hooks.sites.get(hook.slot)
            if of_network is not network or id(hook) in present or site is None or not site.fossil:
                continue
            raise RuntimeError(
                f"the submodule of slot {hook.slot} ({hooks.paths[hook.slot]}) was replaced while the model grew, and "
                "its seed with it: put the former one back, or call grower.close(), which keeps nothing"
            )


def _merge(
    hooks: SiteHooks,
    optimizer: Optimizer,
    before: list[Tensor] | None,
    watch: OptimizerWatch | None,
) -> dict[str, str]:
    """Makes the kept seeds parts of the layers of all networks, if the model's outputs stay those ``before``."""
    rounding = coarsest_dtype(hooks.model)

    def changed() -> str | None:
        after = _outputs(hooks)
        if before is None or after is None:
            return "its outputs cannot be compared"
        return difference(before, after, rounding)

    stay = {} if watch is None else watch.obstacles(hooks.model)
    reasons = merge_in_loop(hooks.model, optimizer, changed, stay)
    for network in hooks.networks:
        if network is not hooks.model:
            with same_parameters(network):
                merge_adapters(network)
                merge_all(network, lambda: None, stay=reasons)
    return reasons


def _outputs(hooks: SiteHooks) -> list[Tensor] | None:
    """Returns what :func:`outputs_of_last` does; None, with a warning, if the model cannot run."""
    try:
        return outputs_of_last(hooks)
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
