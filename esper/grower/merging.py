"""Kept seeds become a part of the layers of a model in training, of its averages and of its optimizer's state."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from esper.config import ConfigError, TrainingConfig
from esper.core.blend import Seed
from esper.core.blueprints.adapted import adapter_pairs, merge_adapters, raises_rank, rank_of
from esper.core.blueprints.source import Extensible
from esper.core.site import PlantedSeed, Site
from esper.core.slots import Bools, Floats, Ints
from esper.grower.optimizer import SeedGroups
from esper.grower.sites import SiteHooks, outputs_of_last
from esper.grower.stepping import SLOT, host_groups, innermost
from esper.hosts.between import place_of
from esper.hosts.container import CONTAINER
from esper.hosts.example import coarsest_dtype, counting, difference
from esper.hosts.gated import Gated
from esper.hosts.layout import Layout
from esper.hosts.merge import last_layer, merge_all, merge_linear, obstacle_to_linear
from esper.hosts.moments import POWERS, Averages, Key, is_like, merged_averages
from esper.hosts.seed_hook import hooks_of
from esper.hosts.widen import (
    NOTHING,
    SourceSeed,
    changed_by,
    draw_pairs,
    merge,
    merge_source,
    obstacle_of,
    resize,
    same_parameters,
    seeds_of_model,
    shapes_of,
)

logger = logging.getLogger(__name__)

Merged = Mapping[str, Mapping[Key, Tensor]]
"""Averages of merged layers, see :func:`merged_averages`."""


def count_operations(hooks: SiteHooks) -> float:
    """Returns the operations of a forward pass of the model, a sample of the last batch.

    They are 0 if nothing can be counted: the model cannot run on the batch in eval mode, or its inputs have no samples.
    """
    if hooks.passes.last is None:
        return 0.0
    try:
        with counting() as counter:
            outputs_of_last(hooks)
    except ConfigError as error:
        logger.info("the operations of a pass are not known: %s", error)
        return 0.0
    samples = hooks.passes.samples
    if not samples:
        return 0.0
    return counter.get_total_flops() / samples


def sizes_of_model(hooks: SiteHooks) -> tuple[int, float]:
    """Returns the parameters and the operations of the model without seeds."""
    parameters = sum(p.numel() for p in hooks.model.parameters())
    with hooks.override_alphas({}):
        return parameters, count_operations(hooks)


_WATCHES: WeakSet[OptimizerWatch] = WeakSet()
_HOOKS: list[RemovableHandle] = []
"""The one hook of all watches. It is not removed with a watch that is collected: that may happen within a step of any
optimizer, whose hooks must not change then."""


def _note(optimizer: Optimizer, _arguments: Any, _keywords: Any) -> None:
    for watch in list(_WATCHES):
        watch.stepped(optimizer)


class OptimizerWatch:
    """Notes which optimizers step beside that of a Grower: what they keep of a merged parameter has its old shape.

    Args:
        own: the optimizer of the Grower.
    """

    def __init__(self, own: Optimizer) -> None:
        self._own = own
        self._others: WeakSet[Any] = WeakSet()
        _WATCHES.add(self)
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_post_hook(_note))

    def stop(self) -> None:
        """Ends the watch; it also ends with this object."""
        _WATCHES.discard(self)
        while _HOOKS and not _WATCHES:
            _HOOKS.pop().remove()

    def stepped(self, optimizer: Optimizer) -> None:
        """Takes note of a step of any optimizer."""
        if innermost(optimizer) is not self._own:
            self._others.add(optimizer)

    def holder_of(self, parameter: Tensor) -> str | None:
        """Returns the class of an optimizer that has stepped ``parameter``; None without one."""
        for optimizer in self._others:
            if parameter in optimizer.state:
                return type(optimizer).__name__
        return None

    def obstacle(self, model: nn.Module, layers: Iterable[nn.Module]) -> str | None:
        """Returns the reason why the ``layers`` of ``model`` cannot change their shapes; None if they can."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        held = {parameter for group in self._own.param_groups for parameter in group["params"]}
        parameters = list(nn.ModuleList(layers).parameters())
        for parameter in parameters:
            holder = self.holder_of(parameter)
            if holder is not None:
                return f"{holder}, beside the Grower's optimizer, trains {names[parameter]} and keeps its shape"
        for parameter in parameters:
            name = names[parameter]
            of_seed = CONTAINER in name.split(".")  # that is kept at the layer
            if parameter.requires_grad and parameter not in held and not of_seed:
                return f"{name} is not in the Grower's optimizer, which trains the seed"
        return None

    def obstacles(self, model: nn.Module) -> dict[str, str]:
        """Returns the reason for each kept seed of ``model`` whose layers cannot change their shapes, by path."""
        layers: dict[str, Iterable[nn.Module]] = {}
        for source in seeds_of_model(model):
            layers[source.name] = source.place.layers
        for path, sink, hook in hooks_of(model):
            if hook.frame is None:
                layers[path] = [last_layer(sink)]
        reasons = {}
        for path, of_seed in layers.items():
            reason = self.obstacle(model, of_seed)
            if reason is not None:
                reasons[path] = reason
        return reasons


class LoopMerger:
    """Merges kept seeds of a model between two epochs of its loop.

    The model's parameters stay the same objects, with other shapes. A seed stays beside its layers if they would not
    train as the seed did, or if the model would compute something else.

    Args:
        hooks: the seeds in the model and in its averages.
        groups: their parameter groups.
    """

    def __init__(self, hooks: SiteHooks, groups: SeedGroups) -> None:
        self.hooks = hooks
        self.groups = groups
        self.watch = OptimizerWatch(groups.optimizer)
        self.merged: dict[str, list[str]] = {}
        """Blueprints of the merged seeds by slot, in order."""
        self.added: list[str] = []
        """Names of parameters that the model did not have, such as the bias of a layer that had none, in order."""

    def close(self) -> None:
        """Leaves the optimizers to their loop."""
        self.watch.stop()
        self.groups.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the shapes of the model's tensors, by name, and what was merged."""
        shapes = {}
        if self.merged:
            shapes = {name: list(shape) for name, shape in shapes_of(self.hooks.model).items()}
        return {"shapes": shapes, "added": list(self.added), "merged": copy.deepcopy(self.merged)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Gives the model, its averages and the optimizer the parameters of a saved one; values are loaded later."""
        self.merged = copy.deepcopy(state["merged"])
        self.added = list(state["added"])
        shapes = {name: tuple(shape) for name, shape in state["shapes"].items()}
        model = self.hooks.model
        for network in self.hooks.networks:
            before = dict(network.named_parameters())
            with same_parameters(network) as replaced:
                resize(network, shapes)
            for name in self.added:
                if name in before:
                    continue
                path, _, attribute = name.rpartition(".")
                layer = network.get_submodule(path)
                if layer._parameters.get(attribute) is None:
                    like = next(layer.parameters())
                    layer.register_parameter(attribute, nn.Parameter(like.new_zeros(shapes[name])))
                if network is model:
                    add_parameter(self.groups.optimizer, model, name)
            for parameter in replaced:
                self.groups.optimizer.state.pop(parameter, None)

    def merge(self, sites: Sequence[Site], due: Bools) -> tuple[Bools, Ints, Floats]:
        """Merges the kept seeds at the ``sites`` that are ``due`` [S] into the layers there.

        Returns the slots that are free again, and the parameters and operations that the model gained by each, [S].
        """
        merged = np.zeros(len(sites), dtype=np.bool_)
        parameters = np.zeros(len(sites), dtype=np.int64)
        flops = np.zeros(len(sites))
        before = None
        for s in np.flatnonzero(due).tolist():
            site = sites[s]
            seed = site.planted
            if seed is None or seed.stays or self._rises(site.name):
                continue
            if before is None:
                before = sizes_of_model(self.hooks)
            seed.stays = self._merge(site, seed)
            if seed.stays:
                continue
            after = sizes_of_model(self.hooks)
            merged[s] = True
            parameters[s] = after[0] - before[0]
            flops[s] = after[1] - before[1]
            before = after
        return merged, parameters, flops

    def _rises(self, name: str) -> bool:
        """Whether the rate of a seed still rises to that of its layers."""
        return self.groups.ages[name] < self.groups.options.warmup_steps

    def _merge(self, site: Site, seed: PlantedSeed) -> str:
        """Merges the kept ``seed`` at ``site``; returns the reason if it stays, "" if it does not."""
        layers = self._layers(site)
        reason = self._obstacle(site, seed.module, layers)
        if reason:
            return reason
        hooks = self.hooks
        optimizer = self.groups.optimizer
        beside = raises_rank(seed.blueprint.name, layers)
        sources = []
        stay = []
        for source in seeds_of_model(hooks.model):
            this = source.body is seed.module.body
            sources.append(replace(source, beside=beside and this))
            if not this:
                stay.append(source.name)
        averages = merged_averages(sources, Averages([optimizer]))
        averaged = averaged_parameters(optimizer)
        seeds = [other.seed for other in hooks.sites.values() if other.seed is not None]
        everything = nn.ModuleList([*hooks.networks, *seeds])
        before = dict(hooks.model.named_parameters())
        wanted = outputs_of_last(hooks)
        rounding = coarsest_dtype(hooks.model)
        state = site.role, site.alpha, site.target, site.learning
        first = beside and not rank_of(layers[0])

        def change() -> None:
            if site.place.has_source:
                self._merge_source(site, seed.module, sources)
            else:
                for network in hooks.networks:
                    sink = network.get_submodule(hooks.paths[site.name].sink)
                    merge_linear(seed.module, site.alpha, last_layer(sink))
            site.remove()

        def changed() -> str | None:
            after = outputs_of_last(hooks)
            if wanted is None or after is None:
                return "its outputs cannot be compared"
            return difference(wanted, after, rounding)

        with same_parameters(everything) as replaced:
            found = changed_by(everything, change, changed)
            if found is not None:
                site.planted = seed
                site.assign(*state)
                return f"something else uses the units of its layers: merged, {found}"
        self.merged.setdefault(site.name, []).append(seed.blueprint.name)
        added = add_parameters(optimizer, hooks.model, before)
        self.added += added
        for new, old in adapter_pairs(layers[0], seed.module) if first else ():
            optimizer.state[new] = optimizer.state[old]
            replaced.add(new)
            if old in averaged:
                averaged.add(new)
        self.groups.remove(site.name)
        self.groups.forget_gradients()
        take_averages(
            optimizer,
            averages(stay),
            replaced,
            averaged,
        )
        return ""

    def _merge_source(
        self,
        site: Site,
        seed: Seed,
        sources: Iterable[SourceSeed],
    ) -> None:
        """Merges a seed that reads a source into the model and its averages."""
        hooks = self.hooks
        (this,) = (source for source in sources if source.body is seed.body)
        others = [source for source in sources if source is not this]
        draw_pairs(replace(this, place=site.place))
        for network in hooks.networks:
            if network is not hooks.model:
                place = place_of(network, site.name, 0, Layout("mlp"), hooks.between[site.name])
                merge(place.layers, seed.body, site.alpha, this.beside)
        merge_source(replace(this, place=site.place, remove=lambda: None), others)

    def _layers(self, site: Site) -> tuple[nn.Module, ...]:
        """Returns the layers that take up the seed of ``site``."""
        if site.place.has_source:
            return site.place.layers
        sink = self.hooks.model.get_submodule(self.hooks.paths[site.name].sink)
        return (last_layer(sink),)

    def _obstacle(
        self,
        site: Site,
        seed: Seed,
        layers: Collection[nn.Module],
    ) -> str | None:
        """Returns the reason why a seed cannot become a part of ``layers`` in training; None if it can."""
        model = self.hooks.model
        reason = obstacle_to_linear(model, seed, *layers) if not site.place.has_source else None
        for source in seeds_of_model(model):
            if source.body is seed.body:
                reason = obstacle_of(model, source)
        if reason is not None:
            return reason
        for layer in layers:
            if isinstance(layer, Extensible) and not isinstance(layer, Gated):
                return f"a {type(layer).__name__} notes its size elsewhere than in its weights"
        if self.groups.options.lr_factor != 1:
            return f"its learning rate is {self.groups.options.lr_factor:g} times that of its layers"
        if site.planted is not None and raises_rank(site.planted.blueprint.name, tuple(layers)):
            return None  # the weights stay as they are
        return self.watch.obstacle(model, layers) or self._unfollowed(layers)

    def _unfollowed(self, layers: Iterable[nn.Module]) -> str | None:
        """Returns the reason why the optimizer cannot go on with the parameters of ``layers``; None if it can."""
        names = {parameter: name for name, parameter in self.hooks.model.named_parameters()}
        for parameter in nn.ModuleList(layers).parameters():
            name = names[parameter]
            if CONTAINER in name.split("."):  # of a seed that is kept at the layer
                continue
            if not parameter.requires_grad:
                return f"{name} is frozen, and the seed is not"
            if not _averages_gradients(self.groups.optimizer, parameter):
                kind = type(self.groups.optimizer).__name__
                return f"what {kind} keeps of {name} is no average of its gradients"
        return None


def refuse_merges(options: Mapping[str, Any]) -> None:
    """Raises ConfigError if the config among these arguments of a Grower lets it merge seeds before the end."""
    config = options.get("config") or {}
    if not isinstance(config, TrainingConfig):
        config = TrainingConfig.parse(dict(config))
    if config.env.merge:
        raise ConfigError(
            "env.merge does not work in a Trainer, whose checkpoints load into a model of the first widths: pass "
            "merge=True to the callback, which merges at the end, or use esper.Grower in a loop of your own"
        )


def merge_in_loop(
    model: nn.Module,
    optimizer: Optimizer,
    difference: Callable[[], str | None],
    stay: Mapping[str, str] = NOTHING,
) -> dict[str, str]:
    """Merges the kept seeds of ``model``, which ``optimizer`` goes on to train.

    The model's parameters stay the same objects, with other shapes. Averages of gradients are put together as the
    parameters are, corrected to the layer's count of steps: a merged layer goes on as the layer and the seed would
    have. A layer that takes up a LoRA keeps its own. Where the state of a changed parameter is something else, such as
    the factors of Adafactor or the weights of schedule-free, it starts anew. ``difference`` and ``stay`` are those of
    :func:`merge_all`.

    Returns the reason for each seed that stays, by path.
    """
    before = dict(model.named_parameters())
    averages = merged_averages(seeds_of_model(model), Averages([optimizer]))
    averaged = averaged_parameters(optimizer)
    with same_parameters(model) as replaced:
        merge_adapters(model)
        reasons = merge_all(model, difference, stay)
    take_averages(
        optimizer,
        averages(reasons),
        replaced,
        averaged,
    )
    add_parameters(optimizer, model, before)
    _remove_parameters(optimizer, set(before.values()) - set(model.parameters()))
    return reasons


def _remove_parameters(optimizer: Optimizer, gone: Collection[nn.Parameter]) -> None:
    """Takes the parameters that are ``gone`` out of their groups, and empty groups of seeds out of the optimizer."""
    remaining = []
    for group in optimizer.param_groups:
        kept = [number for number, parameter in enumerate(group["params"]) if parameter not in gone]
        if len(kept) < len(group["params"]):
            for key in {"params", "param_names"} & group.keys():
                group[key] = [group[key][number] for number in kept]
        if kept or SLOT not in group:
            remaining.append(group)
    optimizer.param_groups[:] = remaining
    for parameter in gone:
        optimizer.state.pop(parameter, None)


def averaged_parameters(optimizer: Optimizer) -> set[Tensor]:
    """Returns the parameters whose state consists of numbers, and of known averages of their gradients."""
    averaged: set[Tensor] = set()
    for group in optimizer.param_groups:
        averaged.update(parameter for parameter in group["params"] if _averages_gradients(optimizer, parameter))
    return averaged


def take_averages(
    optimizer: Optimizer,
    averages: Merged,
    replaced: Collection[Tensor],
    averaged: Collection[Tensor],
) -> None:
    """Gives the parameters that a merge has ``replaced`` the merged ``averages``.

    Those that are not among the ``averaged`` ones, see :func:`averaged_parameters`, have no state any more.
    """
    for key, of_parameters in averages.items():
        for (module, name), value in of_parameters.items():
            parameter = module.get_parameter(name)
            state = optimizer.state.get(parameter, {})
            if parameter in replaced and key in state:
                state[key] = value.to(state[key].dtype)
    for tensor in replaced:
        if tensor not in averaged:
            optimizer.state.pop(tensor, None)


def add_parameters(
    optimizer: Optimizer,
    model: nn.Module,
    before: Collection[str],
) -> list[str]:
    """Adds the parameters of ``model`` that are not named in ``before`` to ``optimizer``; returns their names."""
    added = [name for name, _ in model.named_parameters() if name not in before]
    for name in added:
        add_parameter(optimizer, model, name)
    return added


def add_parameter(optimizer: Optimizer, model: nn.Module, name: str) -> None:
    """Adds a parameter of ``model`` to the group of its layer, or of the module around it that has one."""
    group = _group_of(optimizer, model, name)
    group["params"].append(model.get_parameter(name))
    if "param_names" in group:
        group["param_names"].append(name)


def _group_of(optimizer: Optimizer, model: nn.Module, name: str) -> dict[str, Any]:
    """Returns the group of the layer of a new parameter, such as the bias of a layer that had none."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        of_layer = set(model.get_submodule(path).parameters())
        for group in host_groups(optimizer):
            if not of_layer.isdisjoint(group["params"]):
                return group
    return optimizer.param_groups[0]


def _averages_gradients(optimizer: Optimizer, parameter: Tensor) -> bool:
    """Whether the state of ``parameter`` consists of numbers, and of known averages of its gradients."""
    for key, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        if key not in POWERS or not is_like(value, parameter):
            return False
    return True
