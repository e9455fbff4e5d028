"""The parameter groups of seeds in a user's optimizer, their rates, and what happens to them at each step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.config import ConfigError, TaskConfig
from esper.grower.checks import refuse_other_savers, require_trained_by
from esper.grower.gradients import BackwardWatch, EarlierGradients, GradStash, Ranks, clip_seeds, has_gradient
from esper.grower.stepping import (
    SLOT,
    Group,
    StepCounters,
    arguments_of,
    follow_schedules,
    free_labels,
    has_torch_schedule,
    hook_steps,
    host_groups,
    in_order,
    inherited,
    label_slots,
    rates_of,
    require_groups_apart,
    require_same_rates,
    scaler_of_step,
    show_host_groups,
    unscaling,
    unwrapped,
)
from esper.hosts.sources import SitePath
from esper.training.metrics import HOST, SeedGradientCollector


class ParamGroupMatcher:
    """Maps each seed to the parameter group of its host layer, for its options and its rate.

    It is the group that holds most elements of the submodule's parameters, or of those of source and sink; else that of
    the nearest parameter before the sink, in the order of the model; else the first. Groups may be added, moved and
    replaced at any time, as by ``optimizer.load_state_dict``: a parameter tells which one it is.

    Args:
        model: the host.
        paths: where each slot lies, by its name.
        optimizer: the host's.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Mapping[str, SitePath],
        optimizer: Optimizer,
    ) -> None:
        self._optimizer = optimizer
        self._own: dict[str, list[Tensor]] = {}
        self._before: dict[str, list[Tensor]] = {}
        for name, path in paths.items():
            self._own[name] = []
            for part in dict.fromkeys(path.paths):
                self._own[name].extend(model.get_submodule(part).parameters())
            self._before[name] = _parameters_before(model, path.sink)
        self._groups: list[Group] = []
        self._layout: list[tuple[int, int]] = []
        self._matches: dict[str, Group] = {}

    def group(self, name: str) -> Group:
        """Returns the group that the seed in slot ``name`` follows."""
        groups = host_groups(self._optimizer)
        layout = [(id(group), len(group["params"])) for group in groups]
        if layout != self._layout:
            self._layout = layout
            self._groups = groups  # no later group gets the id of one that is kept
            self._matches.clear()
        if name not in self._matches:
            self._matches[name] = self._search(name, groups)
        return self._matches[name]

    def _search(self, name: str, groups: list[Group]) -> Group:
        index_of: dict[Tensor, int] = {}
        for index, group in enumerate(groups):
            index_of |= dict.fromkeys(group["params"], index)
        elements = Counter[int]()
        for parameter in self._own[name]:
            if parameter in index_of:
                elements[index_of[parameter]] += parameter.numel()
        if elements:
            return groups[max(elements, key=elements.__getitem__)]
        for parameter in reversed(self._before[name]):
            if parameter in index_of:
                return groups[index_of[parameter]]
        return groups[0]


def _parameters_before(model: nn.Module, path: str) -> list[Tensor]:
    """Returns the parameters of the modules that come before the submodule at ``path``, in the order of the model."""
    before: dict[Tensor, None] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name == path:
            break
        before |= dict.fromkeys(module.parameters(recurse=False))
    return list(before)


@dataclass(frozen=True)
class SeedOptions:
    """Rates and decay of seeds. Raises ConfigError for a number that does not fit."""

    lr_factor: float = 1.0
    """Learning rate of a seed in units of that of its layer."""
    warmup_steps: int = 0
    """Number of steps after planting over which the rate rises linearly from near zero."""
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps is {self.warmup_steps}; it must not be negative")
        if not (math.isfinite(self.lr_factor) and self.lr_factor > 0):
            raise ConfigError(f"lr_factor is {self.lr_factor}; it must be positive")

    def rate(self, of_layer: Any, age: int) -> Any:
        """Returns the rate of a seed ``age`` steps after planting; a tensor if that of its layer is a tensor."""
        return of_layer * self.lr_factor * risen(age, self.warmup_steps)


class SeedGroups:
    """Adds a parameter group for each seed, removes it with the seed, and measures and clips gradients at each step.

    A seed has the options of the group of its layer, see :class:`ParamGroupMatcher`, and at every step its rate times
    ``lr_factor``, so it follows any schedule, also after :meth:`close`. Options that a step of the optimizer changes
    are counters of the group; a seed's start anew. The gradients of a seed are clipped to ``task.max_grad_norm`` apart
    from the host's, which are left to the loop.

    Until a seed is on, its gradients are stashed, and are its parameters' only while the optimizer steps: whatever a
    loop does with all parameters of the optimizer, such as clipping them, it does to the host alone.

    Args:
        model: the host.
        paths: where each slot lies, by its name.
        optimizer: the host's.
        scheduler: schedules of ``optimizer``, see :func:`show_host_groups`; () for none; None: none, and a schedule
            that shows is an error.
        options: rates and decay of seeds.
        config: how the gradients of a seed are clipped and judged.
        ranks: those of a data-parallel loop.
        scaler: scales the loop's losses; None if they are not scaled.

    Raises:
        ConfigError: the optimizer cannot update seeds or trains another model, a scheduler is not one of it, or one was
            not passed.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Mapping[str, SitePath],
        optimizer: object,
        scheduler: object,
        options: SeedOptions,
        config: TaskConfig,
        ranks: Ranks,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.ages: dict[str, int] = {}
        """Number of steps since a seed was planted, by slot."""
        self.optimizer = unwrapped(optimizer)
        require_trained_by(model, self.optimizer)
        self.options = options
        self.config = config
        self.ranks = ranks
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        scales_rates = options.lr_factor != 1 or options.warmup_steps
        if scales_rates and any(group["lr"] is None for group in self.optimizer.param_groups):
            raise ConfigError("this optimizer makes its own rates (lr=None), so lr_factor is 1 and warmup_steps 0")
        if scheduler is None and has_torch_schedule(optimizer, self.optimizer):
            raise ConfigError(
                "a learning-rate schedule was made for this optimizer, and it must not see the parameter groups of "
                "seeds: pass it as scheduler=, or scheduler=() if it has ended"
            )
        self.steps = 0
        """Number of optimizer steps so far."""
        self.learning: tuple[str, ...] = ()
        """Slots whose seeds are stepped."""
        self.gradient_stats: SeedGradientCollector | None = None
        """Receives the statistics of every step's gradients; None: they are not measured."""
        require_groups_apart(self.optimizer)
        self._model = model
        self._backward = BackwardWatch(model)
        self._labels = label_slots(self.optimizer, self, paths)
        self._matcher = ParamGroupMatcher(model, paths, self.optimizer)
        self._parameters: dict[str, list[nn.Parameter]] = {}
        self._beside: frozenset[str] = frozenset()
        self._reached: set[str] = set()
        self._stash = GradStash()
        self._earlier = EarlierGradients()
        # Whether the stash was filled after the host's gradients were cleared, before its next pass.
        self._early = False
        self._followed: dict[str, tuple[str, ...]] = {}
        self._counters = StepCounters()
        self._handles: dict[str, list[Any]] = {}
        self.closed = False
        """Whether growth has ended."""
        self._scheduled = scheduler is not None
        self._rates: list[Any] | None = None
        show_host_groups(self.optimizer, scheduler or ())
        follow_schedules(self.optimizer, self._follow_rates)
        self.optimizer.register_load_state_dict_pre_hook(self._loading)
        self.optimizer.register_state_dict_pre_hook(partial(_saving, self))
        hook_steps(optimizer, self._before_step, self._after_step)

    @property
    def host(self) -> list[Tensor]:
        """Parameters of the groups that are no seed's, which a loop may add while it runs."""
        parameters: list[Tensor] = []
        for group in host_groups(self.optimizer):
            parameters += group["params"]
        return parameters

    @property
    def groups(self) -> dict[str, Group]:
        """Groups of seeds by slot name; ``optimizer.load_state_dict`` replaces the dicts."""
        by_label = {group[SLOT]: group for group in self.optimizer.param_groups if SLOT in group}
        groups = {}
        for name, label in self._labels.items():
            if name in self._parameters and label in by_label:
                groups[name] = by_label[label]
        return groups

    @property
    def without_gradient(self) -> tuple[str, ...]:
        """Slots of learning seeds that no step since the last :meth:`set_learning` had a gradient for, on any rank."""
        return tuple(name for name in self.learning if name not in self._reached)

    def add(self, name: str, module: nn.Module, as_its_layer: bool = False) -> None:
        """Adds the group of a new seed; all other groups and all state stay as they are.

        ``as_its_layer``: whether it decays as the layer that it sits on.
        """
        named = [(f"{self._labels[name]}.{key}", p) for key, p in module.named_parameters() if p.requires_grad]
        leader = self._matcher.group(name)
        group = inherited(leader, self._counters.names, self.optimizer.defaults)
        group[SLOT] = self._labels[name]
        group["weight_decay"] = leader.get("weight_decay", 0.0) if as_its_layer else self.options.weight_decay
        self._followed[name] = arguments_of(self.optimizer) + ("weight_decay",) * as_its_layer
        parameters = [p for _, p in named]
        group["params"] = named if "param_names" in leader else list(parameters)
        self.ages[name] = 0
        for key in ("lr", "initial_lr"):
            if leader.get(key) is not None:
                group[key] = self.options.rate(leader[key], 0)
        self.optimizer.add_param_group(group)
        self._parameters[name] = parameters
        accumulated = partial(self._accumulated, name)
        self._handles[name] = []
        for parameter in parameters:
            handle = parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
            self._handles[name].append(handle)

    def remove(self, name: str) -> None:
        """Removes a seed's group and the state of its parameters."""
        gone = self.groups[name]
        self.learning = tuple(other for other in self.learning if other != name)
        self.optimizer.param_groups[:] = [group for group in self.optimizer.param_groups if group is not gone]
        del self.ages[name], self._followed[name]
        for parameter in self._parameters.pop(name):
            self.optimizer.state.pop(parameter, None)
            self._stash.drop([parameter])
            self._earlier.drop([parameter])
        for handle in self._handles.pop(name):
            handle.remove()

    def set_learning(self, names: Sequence[str], on: Collection[str] = ()) -> None:
        """Says which seeds are stepped from now on, and which seeds are on; the others learn beside the host.

        Parameters of seeds that are not stepped need no gradient. Beside a host of which nothing is trained, there is
        nothing to keep gradients from.
        """
        self.learning = tuple(names)
        self._counters.look()
        self._reached = set()
        self._beside = frozenset()
        if any(p.requires_grad for p in self.host):
            self._beside = frozenset(names).difference(on)
        for name, parameters in self._parameters.items():
            learns = name in self.learning
            for parameter in parameters:
                parameter.requires_grad_(learns)
                if not learns:
                    parameter.grad = None
            if name not in self._beside:
                self._stash.drop(parameters)
                self._earlier.drop(parameters)
        if self.gradient_stats is not None:
            self.gradient_stats.restart((HOST, *self.learning))

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Returns the gradient of a seed's parameter so far, wherever it is kept."""
        if parameter.grad is not None:
            return parameter.grad
        stashed = self._stash.get(parameter)
        return self._earlier.get(parameter) if stashed is None else stashed

    def stash(self, parameter: Tensor, gradient: Tensor) -> None:
        """Adds ``gradient``, which is not in ``parameter.grad``, to those of a seed that is not on."""
        self._settle()
        if not self._early and _is_cleared(self.host):
            self.forget_gradients()
            self._early = True
        self._stash.add(parameter, gradient)

    def begin_pass(self) -> None:
        """Forgets gradients of seeds if the loop has cleared the host's; call it before each training pass.

        ``model.zero_grad()`` does not reach seeds. A step clears them, but a GradScaler may skip it. Those that the
        loop has not cleared yet are kept aside until the backward pass.
        """
        on = self._on()
        waiting = self._stash or any(p.grad is not None for p in on)
        if waiting and not self._early:
            if _is_cleared(self.host):
                self.forget_gradients()
            elif torch.is_grad_enabled():
                self._earlier.take(on, self._stash, self._model, self.host)
        self._early = False

    def _settle(self) -> None:
        """Adds the gradients from before the present pass to those of seeds, unless the loop has cleared the host's."""
        if not self._earlier:
            return
        beside = set()
        for name in self._beside:
            beside.update(self._parameters[name])
        self._earlier.settle().add_to(self._stash, beside)

    def close(self) -> None:
        """Leaves the optimizer to its loop; seeds whose groups are still there keep following the host's rates."""
        self.closed = True
        free_labels(self.optimizer, self)
        self._backward.stop()
        self._stash.drop()
        self._earlier.drop()
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        """Autograd has added to a parameter's gradient."""
        self._settle()
        if name in self._beside:
            self._stash.take(parameter)

    def _before_step(self, optimizer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Prepares a step. Returns its arguments with another closure, if it has one."""
        self._follow_rates()
        if self.closed:
            return None
        if not self._scheduled:
            rates = rates_of(self.optimizer)
            if rates != self._rates:
                require_same_rates(self._rates, rates)
        self.steps += 1
        self._counters.before_step(self.optimizer)
        closure: Callable[[], Any] | None = keywords.get("closure", *arguments[1:2])
        if closure is None:
            self._take_gradients(optimizer)
            return None

        def then_take() -> Any:
            # An earlier call of the closure has handed gradients back.
            for name in self._beside:
                _clear(self._parameters[name])
            loss = closure()
            self._take_gradients(optimizer)
            return loss

        others = {key: value for key, value in keywords.items() if key != "closure"}
        return (arguments[0], then_take, *arguments[2:]), others

    def _after_step(self, _optimizer: Any, _arguments: Any, _keywords: Any) -> None:
        """Clears the gradients of seeds, which ``model.zero_grad()`` does not reach, and notes counters."""
        for name in self.learning:
            self.ages[name] += 1
        if self.closed:
            return
        for parameters in self._parameters.values():
            _clear(parameters)
        if not self._scheduled:
            self._rates = rates_of(self.optimizer)
        self._counters.after_step(self.optimizer)

    def _loading(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        self._rates = None
        return in_order(optimizer, state)

    def _on(self) -> list[nn.Parameter]:
        """Parameters of learning seeds whose gradients are where a loop expects them."""
        parameters: list[nn.Parameter] = []
        for name in self.learning:
            if name not in self._beside:
                parameters += self._parameters[name]
        return parameters

    def forget_gradients(self) -> None:
        self._stash.drop()
        self._earlier.drop()
        _clear(self._on())

    def _follow_rates(self) -> None:
        if not self._parameters:  # no seed is there, and a loop has no time to lose
            return
        for name, group in self.groups.items():
            leader = self._matcher.group(name)
            if leader["lr"] is not None:
                _set_rate(group, self.options.rate(leader["lr"], self.ages[name]))
            group.update({key: leader[key] for key in self._followed[name] if key in leader})

    def _take_gradients(self, optimizer: Any) -> None:
        """Hands gradients back, averages and clips those of seeds, and measures all."""
        self._backward.check()
        self.ranks.check()
        self._settle()
        if self.learning or self._stash:
            _take_those_of_seeds(self, optimizer)


def _saving(groups: SeedGroups, optimizer: Optimizer) -> None:
    """The state of the optimizer is asked for."""
    if groups._parameters and not groups.closed:
        refuse_other_savers(optimizer)


@torch.no_grad()
def _take_those_of_seeds(groups: SeedGroups, optimizer: Any) -> None:
    scaler = scaler_of_step(groups.scaler, optimizer, groups.optimizer)
    groups._stash.hand_back(unscaling(scaler, optimizer))
    if groups.gradient_stats is None or not groups.learning:
        return  # the host's statistics are read beside those of a seed only
    seeds = [groups._parameters[name] for name in groups.learning]
    groups.ranks.average(list(chain.from_iterable(seeds)))
    for name, parameters in zip(groups.learning, seeds, strict=True):
        if any(p.grad is not None for p in parameters):
            groups._reached.add(name)
    scale = getattr(optimizer, "grad_scale", None)
    for skipped in clip_seeds([groups.host, *seeds], groups.gradient_stats, groups.config, scale, scaler is not None):
        _clear(seeds[skipped - 1])


def first_rate(optimizer: Optimizer) -> float:
    """Learning rate, before its schedule, of the group with the most parameters; 0 for a rate that is not set."""

    def elements(group: Group) -> int:
        return sum(parameter.numel() for parameter in group["params"])

    group = max(host_groups(optimizer), key=elements)
    rate = group.get("initial_lr")
    return float(group["lr"] if rate is None else rate) if group["lr"] is not None else 0.0


def risen(age: int, steps: int) -> float:
    """Returns the share that a rate which rises over ``steps`` steps has reached in the step after ``age`` steps."""
    if age >= steps:
        return 1.0
    return (age + 1) / steps


def _clear(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _is_cleared(host: Collection[Tensor]) -> bool:
    """Whether some of the parameters of ``host`` are trained, and none has a gradient."""
    trained = False
    for parameter in host:
        if not parameter.requires_grad:
            continue
        if has_gradient(parameter):
            return False
        trained = True
    return trained


def _set_rate(group: Group, rate: float | Tensor) -> None:
    """Sets a group's rate; one that is a tensor keeps its memory."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
