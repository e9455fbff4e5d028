"""The parameter groups of seeds in an optimizer that someone else made, steps and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from esper.config import ConfigError, TaskConfig
from esper.grower.ranks import Ranks
from esper.ops import grad_stats
from esper.training.host_training import HOST
from esper.training.metrics import SeedGradientCollector

Scheduler = LRScheduler
UNFIT = (torch.optim.LBFGS, torch.optim.Muon, torch.optim.SparseAdam)
"""Optimizers for one group, for matrices only, and for sparse gradients."""
Group = dict[str, Any]


class HostGroups:
    """An optimizer without the groups of seeds: what a learning-rate scheduler sees of it.

    Schedulers keep one base rate for each group that existed when they were made, and fail if there are more.
    """

    def __init__(self, optimizer: Any, count: int) -> None:
        self.whole, self._count = optimizer, count

    @property
    def param_groups(self) -> list[Group]:
        return list(self.whole.param_groups[: self._count])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)


def unwrapped(optimizer: object) -> Optimizer:
    """Returns the torch optimizer inside ``optimizer``, which may be wrapped in objects with an ``optimizer``.

    Raises ConfigError if there is none, or if it cannot update seeds.
    """
    found: Any = optimizer
    while (inner := getattr(found, "optimizer", None)) is not None:  # accelerate's wrapper is an Optimizer itself
        found = inner
    if not isinstance(found, Optimizer):
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    if isinstance(found, UNFIT):
        raise ConfigError(
            f"{type(found).__name__} cannot update seeds, which have dense parameters of any shape in groups of their "
            "own; use another optimizer, such as AdamW or SGD"
        )
    return found


def plain_schedulers(given: object) -> list[Scheduler]:
    """Returns the torch schedulers in ``given``, one or several, each of which may be wrapped as in accelerate.

    They are followed by those that they are made of.
    """
    each: list[Any] = [given] if hasattr(given, "step") else list(given)  # type: ignore[call-overload]
    plain = [one if isinstance(one, Scheduler) else one.scheduler for one in each]
    return [*plain, *(inner for one in plain for inner in plain_schedulers(getattr(one, "_schedulers", ())))]


class SeedGroups:
    """Adds a parameter group for each seed, removes it with the seed, and measures and clips gradients at each step.

    A seed's rate is that of the host's first group times ``factor`` at every step, so it follows any schedule. The
    gradients of a seed are clipped to ``task.max_grad_norm`` apart from the host's, which are left to the loop.

    Args:
        optimizer: the host's.
        schedulers: those of ``optimizer``, see :func:`plain_schedulers`.
        factor: learning rate of a seed in units of the host's.
        weight_decay: of seeds.
        config: how the gradients of a seed are clipped and judged.
        ranks: those of a data-parallel loop.

    Raises:
        ConfigError: a scheduler of ``optimizer`` is not among ``schedulers``.
    """

    def __init__(
        self,
        optimizer: object,
        schedulers: Iterable[Scheduler],
        factor: float,
        weight_decay: float,
        config: TaskConfig,
        ranks: Ranks,
    ) -> None:
        self.optimizer = unwrapped(optimizer)
        self.factor, self.weight_decay, self.config, self.ranks = factor, weight_decay, config, ranks
        self.steps = 0
        """Number of optimizer steps so far."""
        self.host = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.learning: tuple[str, ...] = ()
        """Slots whose seeds are stepped."""
        self._schedulers: list[Any] = list(schedulers)
        if not self._schedulers and hasattr(self.optimizer.step, "_wrapped_by_lr_sched"):
            raise ConfigError(
                "a learning-rate scheduler uses this optimizer: pass it as scheduler=, because schedulers fail when an "
                "optimizer gets parameter groups that they do not know"
            )
        for scheduler in self._schedulers:
            scheduler.optimizer = HostGroups(scheduler.optimizer, len(self.optimizer.param_groups))
        self.gradient_stats: SeedGradientCollector | None = None
        """Receives the statistics of every step's gradients; None: they are not measured."""
        self._aside: list[tuple[Tensor, Tensor]] = []
        """Parameters of seeds and their gradients, see :meth:`set_aside`."""
        self._handles = [
            self.optimizer.register_step_pre_hook(self._before_step),
            self.optimizer.register_step_post_hook(lambda *_: self.forget_gradients()),
        ]

    def add(self, name: str, module: nn.Module) -> None:
        """Adds the group of a new seed; all other groups and all state stay as they are."""
        first = self.optimizer.param_groups[0]
        options = {key: value for key, value in first.items() if key not in ("params", "param_names")}
        named = [(f"{name}.{key}", p) for key, p in module.named_parameters() if p.requires_grad]
        params: Sequence[Any] = named if "param_names" in first else [p for _, p in named]
        rate = first["lr"] * self.factor
        self.optimizer.add_param_group(
            {**options, "params": params, "lr": rate, "weight_decay": self.weight_decay, "slot": name}
        )

    @property
    def groups(self) -> dict[str, Group]:
        """Groups of seeds by slot name; ``optimizer.load_state_dict`` replaces the dicts."""
        return {group["slot"]: group for group in self.optimizer.param_groups if "slot" in group}

    def remove(self, name: str) -> None:
        """Removes a seed's group and the state of its parameters."""
        gone = self.groups[name]
        self.optimizer.param_groups[:] = [group for group in self.optimizer.param_groups if group is not gone]
        for parameter in gone["params"]:
            self.optimizer.state.pop(parameter, None)

    def set_learning(self, names: Sequence[str]) -> None:
        """Says which seeds are stepped from now on; parameters of the others need no gradient."""
        self.learning = tuple(names)
        for name, group in self.groups.items():
            for parameter in group["params"]:
                parameter.requires_grad_(name in self.learning)
                if name not in self.learning:
                    parameter.grad = None
        if self.gradient_stats is not None:
            self.gradient_stats.restart((HOST, *self.learning))

    def set_aside(self) -> None:
        """Takes the gradients of seeds away until the optimizer steps.

        A loop that clips all parameters of the optimizer then clips the host as it would without seeds.
        """
        parameters = [p for group in self.groups.values() for p in group["params"]]
        self._aside = [(p, p.grad) for p in parameters if p.grad is not None]
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Clears the gradients of seeds, which ``model.zero_grad()`` does not reach; every step does."""
        for group in self.groups.values():
            for p in group["params"]:
                p.grad = None

    def close(self) -> None:
        """Leaves the optimizer to its loop; groups that are still there stay."""
        for handle in self._handles:
            handle.remove()
        for scheduler in self._schedulers:
            scheduler.optimizer = scheduler.optimizer.whole

    def _before_step(self, optimizer: Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self.steps += 1
        rate = optimizer.param_groups[0]["lr"]
        for group in self.groups.values():
            _set_rate(group, rate * self.factor)
        closure: Callable[[], Any] | None = keywords.get("closure", arguments[1] if len(arguments) > 1 else None)
        if closure is None:
            self._read_gradients(optimizer)
            return None

        def then_read() -> Any:
            loss = closure()
            self._read_gradients(optimizer)
            return loss

        return (optimizer, then_read), {}

    def _read_gradients(self, optimizer: Optimizer) -> None:
        """Measures all gradients, and averages and clips those of seeds."""
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside.clear()
        if self.gradient_stats is None or not self.gradient_stats.names:
            return
        owners = [self.host, *(self.groups[name]["params"] for name in self.learning)]
        gradients = [[p.grad for p in owner if p.grad is not None] for owner in owners]
        self.ranks.average([g for mine in gradients[1:] for g in mine])
        scale = getattr(optimizer, "grad_scale", None)  # set while a GradScaler steps a fused optimizer
        measured = gradients if scale is None else [[g / scale for g in mine] for mine in gradients]
        stats = grad_stats(measured, self.config.max_grad_norm, self.config.exploding_norm, device=self.host[0].device)
        self.gradient_stats.add(stats)
        for mine, factor in zip(gradients[1:], stats.clip_coef[1:], strict=True):
            for gradient in mine:
                gradient.mul_(factor)


def _set_rate(group: Group, rate: float | Tensor) -> None:
    """Sets a group's rate; one that is a tensor keeps its memory."""
    if isinstance(group["lr"], Tensor):
        group["lr"].copy_(torch.as_tensor(rate))
    else:
        group["lr"] = rate
