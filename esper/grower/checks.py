"""Checks of a Grower: it refuses bad input, with the reason and before anything is planted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any

from torch import nn

from esper.config import ConfigError
from esper.grower.hooks import SiteHooks
from esper.grower.optimizer import SeedGroups
from esper.grower.ranks import Ranks, is_sharded
from esper.hosts.site_path import SitePath
from esper.seeds.blueprints import BlueprintRegistry, choose
from esper.seeds.place import Place

FORMAT = 5
"""Format of a Grower's state."""


def check_state(state: Mapping[str, Any], slots: Sequence[str]) -> None:
    """Raises ConfigError for the state of another Grower."""
    if state.get("format") != FORMAT:
        raise ConfigError(f"the state has format {state.get('format')}; this version reads {FORMAT}")
    if "env" not in state:
        return
    saved = state["env"]["hosts"]["channels"]
    if set(saved) != set(slots):
        raise ConfigError(f"the state has slots {', '.join(saved)}, not {', '.join(slots)}")


def require_trained(hooks: SiteHooks, groups: SeedGroups, steps_before: int, incubated: bool) -> None:
    """Raises RuntimeError if the model or a seed was not trained since the last decision.

    ``steps_before`` is the number of the optimizer's steps then; ``incubated`` whether shadow losses were given.
    """
    if groups.steps == steps_before:
        raise RuntimeError(
            "the optimizer has not stepped since the last grower.step(); call it once after each epoch, with the "
            "optimizer that the Grower was given"
        )
    unseen = [name for name in hooks.sites if name not in hooks.probes]
    if unseen:
        raise RuntimeError(
            f"no pass in training mode has run slot {', '.join(unseen)}: call model.train() before each epoch, and "
            "leave only frozen submodules in eval mode"
        )
    waiting = [name for name, site in hooks.sites.items() if site.incubating and site.learning]
    if waiting and not hooks.straight_through and not incubated:
        raise RuntimeError(
            f"the seed in slot {', '.join(waiting)} has learned nothing: with incubation='shadow', call "
            "grower.incubate(lambda: loss of the batch) before each optimizer step"
        )
    untaught = groups.without_gradient
    if untaught:
        where = ", ".join(f"{name} ({hooks.paths[name]})" for name in untaught)
        cause = "the loss does not depend on the output of its submodule"
        if not hooks.learned.issuperset(untaught):
            cause = "its submodule ran without gradients: take it out of torch.no_grad()"
        raise RuntimeError(
            f"the seed in slot {where} has learned nothing, because {cause}. A frozen network needs only "
            "requires_grad_(False) on its parameters"
        )


def check_arguments(
    horizon: int,
    baseline: Sequence[float] | None,
    incubation: str,
    ranks: Ranks,
    **positive: float,
) -> None:
    """Raises ConfigError for a number that does not fit, or a way to incubate that does not work."""
    if not isinstance(horizon, Integral) or horizon < 2:
        raise ConfigError(f"horizon is {horizon!r}; it is the number of epochs that the loop trains, at least 2")
    for name, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} is {value}; it must be positive")
    if baseline is not None and len(baseline) != horizon:
        raise ConfigError(f"baseline has {len(baseline)} scores; one after each of the {horizon} epochs is needed")
    if incubation not in ("ste", "shadow"):
        raise ConfigError(f"incubation is {incubation!r}; it must be 'ste' or 'shadow'")
    if incubation == "shadow" and ranks.parallel:
        raise ConfigError("incubation='shadow' does not work with DistributedDataParallel; use 'ste'")


def check_blueprints(
    wanted: tuple[str, ...] | None,
    registry: BlueprintRegistry,
    paths: Mapping[str, SitePath],
    topology: str | None,
) -> None:
    """Raises ConfigError for a wanted blueprint that fits at no site of this topology; None: of any."""
    reading = {path.source is not None for path in paths.values()}
    topologies = (topology,) if topology else registry.topologies()
    possible: dict[str, None] = {}
    for kind in topologies:
        possible |= dict.fromkeys(registry.possible(kind, reading))
    places = [Place(slot, 0, path.source is not None) for slot, path in paths.items()]
    misfit = partial(registry.misfit, topology or "", places)
    choose(wanted, tuple(possible), f"{topology or 'such'} hosts", misfit)


def plain_model(model: nn.Module) -> tuple[nn.Module, Ranks]:
    """Returns the network inside ``DistributedDataParallel``, or ``model``, and the ranks that train it.

    Raises ConfigError for a compiled model: seeds that come and go would recompile it at every change.
    """
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        raise ConfigError(
            "the model is compiled, and every change of a seed would compile it again: pass the model itself, and "
            "compile what grower.finish() returns"
        )
    if isinstance(model, nn.DataParallel):
        raise ConfigError("nn.DataParallel copies the model for each pass; use DistributedDataParallel")
    if is_sharded(model):
        raise ConfigError("the model's parameters are split over ranks, and seeds are not; use DistributedDataParallel")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module, Ranks(parallel=True)
    return model, Ranks(parallel=False)
