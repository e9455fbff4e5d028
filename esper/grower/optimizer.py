"""The parameter groups of seeds in an optimizer that someone else made, and what happens to them at each step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.config import ConfigError, TaskConfig
from esper.grower.gradients import Aside, measurable, measure
from esper.grower.leaders import Leaders
from esper.grower.ranks import Ranks
from esper.grower.schedules import SLOT, Group, follow_schedules, host_groups, in_order, show_host_groups
from esper.grower.stepping import ScalerSearch, hook_steps, unscaling, unwrapped
from esper.hosts.site_path import SitePath
from esper.training.metrics import HOST, SeedGradientCollector

NOT_INHERITED = ("params", "param_names", "lr", "initial_lr", "weight_decay", SLOT)
"""Options of a group that a seed's group does not copy."""


class SeedGroups:
    """Adds a parameter group for each seed, removes it with the seed, and measures and clips gradients at each step.

    A seed has the options of the group of the submodule that it sits on, see :class:`Leaders`, and at every step its
    rate times ``factor``, so it follows any schedule, also after :meth:`close`; over its first ``warmup_steps`` steps
    it rises to that. Options that a step of the optimizer changes are counters of the group; a seed's start anew. The
    gradients of a seed are clipped to ``task.max_grad_norm`` apart from the host's, which are left to the loop.

    Until a seed is on, its gradients are kept aside, and are its parameters' only while the optimizer steps: whatever
    a loop does with all parameters of the optimizer, such as clipping them, it does to the host alone.

    Args:
        model: the host.
        paths: where each slot lies, by its name.
        optimizer: the host's.
        scheduler: schedules of ``optimizer`` that are not found by themselves, see :func:`show_host_groups`.
        factor: learning rate of a seed in units of the host's.
        warmup_steps: number of steps after planting over which the rate of a seed rises linearly from near zero.
        weight_decay: of seeds.
        config: how the gradients of a seed are clipped and judged.
        ranks: those of a data-parallel loop.

    Raises:
        ConfigError: the optimizer cannot update seeds, or a scheduler is not one of it.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: Mapping[str, SitePath],
        optimizer: object,
        scheduler: object,
        factor: float,
        weight_decay: float,
        config: TaskConfig,
        ranks: Ranks,
        warmup_steps: int = 0,
    ) -> None:
        self.warmup_steps = warmup_steps
        self.ages: dict[str, int] = {}
        """Number of steps since a seed was planted, by slot."""
        self.optimizer = unwrapped(optimizer)
        self.factor = factor
        self.weight_decay = weight_decay
        self.config = config
        self.ranks = ranks
        scales_rates = factor != 1 or warmup_steps
        if scales_rates and any(group["lr"] is None for group in self.optimizer.param_groups):
            raise ConfigError("this optimizer makes its own rates (lr=None), so lr_factor is 1 and warmup_steps 0")
        self.steps = 0
        """Number of optimizer steps so far."""
        self.learning: tuple[str, ...] = ()
        """Slots whose seeds are stepped."""
        self.gradient_stats: SeedGradientCollector | None = None
        """Receives the statistics of every step's gradients; None: they are not measured."""
        keep_apart_from_earlier(self.optimizer)
        self._leaders = Leaders(model, paths, self.optimizer)
        self._parameters: dict[str, list[nn.Parameter]] = {}
        self._beside: frozenset[str] = frozenset()
        self._reached: set[str] = set()
        self._aside = Aside()
        # Whether what is aside was put there after the host's gradients were cleared, before its next pass.
        self._early = False
        self._counters: set[str] = set()
        self._options: dict[str, Any] = {}
        self._handles: dict[str, list[Any]] = {}
        self._scalers = ScalerSearch()
        self._closed = False
        show_host_groups(self.optimizer, scheduler)
        follow_schedules(self.optimizer, self._follow_rates)
        self.optimizer.register_load_state_dict_pre_hook(in_order)
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
        groups = {}
        for group in self.optimizer.param_groups:
            name = group.get(SLOT)
            if name in self._parameters:
                groups[name] = group
        return groups

    @property
    def without_gradient(self) -> tuple[str, ...]:
        """Slots of learning seeds that no step since the last :meth:`set_learning` had a gradient for, on any rank."""
        return tuple(name for name in self.learning if name not in self._reached)

    def add(self, name: str, module: nn.Module, as_its_layer: bool = False) -> None:
        """Adds the group of a new seed; all other groups and all state stay as they are.

        ``as_its_layer``: whether it decays as the layer that it sits on.
        """
        show_host_groups(self.optimizer)
        named = [(f"{name}.{key}", p) for key, p in module.named_parameters() if p.requires_grad]
        leader = self._leaders.group(name)
        group = inherited(leader, self._counters, self.optimizer.defaults)
        group[SLOT] = name
        group["weight_decay"] = leader.get("weight_decay", 0.0) if as_its_layer else self.weight_decay
        parameters = [p for _, p in named]
        group["params"] = named if "param_names" in leader else list(parameters)
        self.ages[name] = 0
        for key in ("lr", "initial_lr"):
            if leader.get(key) is not None:
                group[key] = leader[key] * self.factor * risen(0, self.warmup_steps)
        self.optimizer.add_param_group(group)
        self._parameters[name] = parameters
        accumulated = partial(self._accumulated, name)
        self._handles[name] = []
        for parameter in parameters:
            handle = parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
            self._handles[name].append(handle)

    def remove(self, name: str) -> None:
        """Removes a seed's group and the state of its parameters."""
        show_host_groups(self.optimizer)
        gone = self.groups[name]
        self.optimizer.param_groups[:] = [group for group in self.optimizer.param_groups if group is not gone]
        del self.ages[name]
        for parameter in self._parameters.pop(name):
            self.optimizer.state.pop(parameter, None)
            self._aside.drop([parameter])
        for handle in self._handles.pop(name):
            handle.remove()

    def set_learning(self, names: Sequence[str], on: Collection[str] = ()) -> None:
        """Says which seeds are stepped from now on, and which seeds are on; the others learn beside the host.

        Parameters of seeds that are not stepped need no gradient. Beside a host of which nothing is trained, there is
        nothing to keep gradients from.
        """
        self.learning = tuple(names)
        self._reached = set()
        self._scalers.next_epoch()
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
                self._aside.drop(parameters)
        if self.gradient_stats is not None:
            self.gradient_stats.restart((HOST, *self.learning))

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Returns the gradient of a seed's parameter so far, wherever it is kept."""
        if parameter.grad is not None:
            return parameter.grad
        return self._aside.get(parameter)

    def put_aside(self, parameter: Tensor, gradient: Tensor) -> None:
        """Adds ``gradient``, which is not in ``parameter.grad``, to those of a seed that is not on."""
        if not self._early and self._is_host_cleared():
            self._forget_gradients()
            self._early = True
        self._aside.add(parameter, gradient)

    def begin_pass(self) -> None:
        """Forgets gradients of seeds if the loop has cleared the host's; call it before each training pass.

        ``model.zero_grad()`` does not reach seeds. A step clears them, but a GradScaler may skip it.
        """
        waiting = self._aside or any(p.grad is not None for p in self._on())
        if waiting and not self._early and self._is_host_cleared():
            self._forget_gradients()
        self._early = False

    def close(self) -> None:
        """Leaves the optimizer to its loop; seeds whose groups are still there keep following the host's rates."""
        self._closed = True
        self._aside.drop()
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        """Autograd has added to a parameter's gradient."""
        if name in self._beside:
            self._aside.take(parameter)

    def _before_step(self, optimizer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Prepares a step. Returns its arguments with another closure, if it has one."""
        self._follow_rates()
        if self._closed:
            return None
        self.steps += 1
        self._options = _marked(host_groups(self.optimizer)[0])
        second = arguments[1] if len(arguments) > 1 else None
        closure: Callable[[], Any] | None = keywords.get("closure", second)
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

        others = dict(keywords)
        others.pop("closure", None)
        return (arguments[0], then_take, *arguments[2:]), others

    def _after_step(self, _optimizer: Any, _arguments: Any, _keywords: Any) -> None:
        """Clears the gradients of seeds, which ``model.zero_grad()`` does not reach, and notes counters."""
        for name in self.learning:
            self.ages[name] += 1
        if self._closed:
            return
        for parameters in self._parameters.values():
            _clear(parameters)
        after = _marked(host_groups(self.optimizer)[0])
        for key, value in after.items():
            if key not in self._options or value != self._options[key]:
                self._counters.add(key)

    def _on(self) -> list[nn.Parameter]:
        """Parameters of learning seeds whose gradients are where a loop expects them."""
        parameters: list[nn.Parameter] = []
        for name in self.learning:
            if name not in self._beside:
                parameters += self._parameters[name]
        return parameters

    def _is_host_cleared(self) -> bool:
        """Whether the host is trained, and has no gradients."""
        trained = False
        for parameter in self.host:
            if not parameter.requires_grad:
                continue
            if _has_gradient(parameter):
                return False
            trained = True
        return trained

    def _forget_gradients(self) -> None:
        self._aside.drop()
        _clear(self._on())

    def _follow_rates(self) -> None:
        for name, group in self.groups.items():
            rate = self._leaders.group(name)["lr"]
            if rate is not None:
                _set_rate(group, rate * self.factor * risen(self.ages[name], self.warmup_steps))

    @torch.no_grad()
    def _take_gradients(self, optimizer: Any) -> None:
        """Hands gradients back, averages and clips those of seeds, and measures all."""
        scaler = self._scalers.of_step(optimizer, self.optimizer)
        self._aside.hand_back(unscaling(scaler, optimizer))
        if self.gradient_stats is None or not self.learning:
            return  # the host's statistics are read beside those of a seed only
        seeds = [self._parameters[name] for name in self.learning]
        self.ranks.average(list(chain.from_iterable(seeds)))
        gradients = [_gradients_of(self.host), *map(_gradients_of, seeds)]
        for name, of_seed in zip(self.learning, gradients[1:], strict=True):
            if of_seed:
                self._reached.add(name)
        measured = gradients
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:  # a fused optimizer divides by it itself
            measured = [_divided(of_owner, scale) for of_owner in gradients]
        stats = measure(
            measured,
            self.config.max_grad_norm,
            self.config.exploding_norm,
            device=self.host[0].device,
        )
        # The scale may be too large for a seed alone. Its step is skipped, as the scaler does for the host.
        overflowed = None if scaler is None else stats.clip_coef == 0
        # A branch that was left out of this step, as by LayerDrop, has no gradient that could be healthy or not.
        without = stats.tensors == 0
        self.gradient_stats.add(stats, without if overflowed is None else without | overflowed)
        for of_seed, factor in zip(gradients[1:], stats.clip_coef[1:], strict=True):
            if factor.is_cpu and factor.item() == 1:
                continue
            for gradient in of_seed:
                gradient.mul_(factor.to(gradient.device))
        if overflowed is None:
            return
        for parameters, skipped in zip(seeds, overflowed[1:].tolist(), strict=True):
            if skipped:
                _clear(parameters)


def keep_apart_from_earlier(optimizer: Optimizer) -> None:
    """Renames the groups of seeds that an earlier Grower has kept, whose slots may be those of a new one."""
    for group in optimizer.param_groups:
        if SLOT in group:
            group[SLOT] = f"kept {group[SLOT]}"


def inherited(
    leader: Group,
    counters: Collection[str],
    defaults: Mapping[str, Any],
) -> Group:
    """Returns the options of ``leader`` for a new group, with ``counters`` as in a new optimizer."""
    group = {}
    for key, value in leader.items():
        if key in NOT_INHERITED:
            continue
        if key not in counters:
            group[key] = copy.deepcopy(value)
        elif key in defaults:
            group[key] = copy.deepcopy(defaults[key])
    return group


def risen(age: int, steps: int) -> float:
    """Returns the share that a rate which rises over ``steps`` steps has reached in the step after ``age`` steps."""
    if age >= steps:
        return 1.0
    return (age + 1) / steps


def _gradients_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def _divided(gradients: list[Tensor], scale: Tensor) -> list[Tensor]:
    return [gradient / scale.to(gradient.device) for gradient in gradients]


def _clear(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _has_gradient(parameter: Tensor) -> bool:
    """Whether a parameter's gradient was not cleared, which ``zero_grad(set_to_none=False)`` does with zeros."""
    if parameter.grad is None:
        return False
    values = measurable(parameter.grad)
    return values is None or bool(values.any())


def _marked(group: Group) -> dict[str, Any]:
    """Returns the options of a group, so that two of them tell which have changed; tensors are not read."""
    marks: dict[str, Any] = {}
    for key, value in group.items():
        if key in NOT_INHERITED:
            continue
        if isinstance(value, Tensor):
            marks[key] = (id(value), value._version)
        else:
            marks[key] = copy.copy(value)
    return marks


def _set_rate(group: Group, rate: float | Tensor) -> None:
    """Sets a group's rate; one that is a tensor keeps its memory."""
    if isinstance(group["lr"], Tensor):
        group["lr"].copy_(torch.as_tensor(rate))
    else:
        group["lr"] = rate
