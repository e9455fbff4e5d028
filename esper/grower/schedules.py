"""Learning-rate schedules of an optimizer to which seeds add groups, and saved states of such an optimizer."""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from numbers import Number
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from esper.config import ConfigError
from esper.grower.stepping import innermost

SLOT = "slot"
"""Key of a seed's parameter group; no other group has it."""
TIMM = "timm.scheduler.scheduler"
"""Module of the class of all schedulers of timm."""

PER_GROUP = re.compile(r"base.*|.*lrs?|.*(lambdas|momentums|values|rates)|warmup_steps")
"""Names under which schedules keep lists with an entry for each group."""

Group = dict[str, Any]


class HostGroups:
    """An optimizer without the groups of seeds: what a schedule sees of it.

    Schedules keep one base rate for each group that existed when they were made, and fail or drift if others come and
    go. A view equals its optimizer, so that libraries find which optimizer a schedule belongs to.
    """

    def __init__(self, optimizer: Any) -> None:
        self.whole = optimizer

    @property
    def param_groups(self) -> list[Group]:
        return _Groups(host_groups(self.whole), _followers.get(innermost(self.whole)))

    def __getattr__(self, name: str) -> Any:
        # A copy asks for special methods, and for `whole` before it has been filled.
        if name == "whole" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, HostGroups):
            return self.whole is other.whole
        return self.whole is other

    def __hash__(self) -> int:
        return hash(self.whole)


class _Groups(list[Group]):
    """Groups of a view. When a schedule has gone through them, seeds follow the rates that it has set."""

    def __init__(
        self,
        groups: list[Group],
        follow: WeakMethod[Callable[[], None]] | None,
    ) -> None:
        super().__init__(groups)
        self._follow = follow

    def __iter__(self) -> Iterator[Group]:
        yield from super().__iter__()
        if self._follow is None:
            return
        follow = self._follow()
        if follow is not None:
            follow()


_followers: WeakKeyDictionary[Optimizer, WeakMethod[Callable[[], None]]] = WeakKeyDictionary()


def follow_schedules(optimizer: Optimizer, follow: Callable[[], None]) -> None:
    """Calls the method ``follow`` whenever a schedule of ``optimizer`` has set rates; a later one replaces it."""
    _followers[optimizer] = WeakMethod(follow)


def host_groups(optimizer: Any) -> list[Group]:
    """Returns the parameter groups of ``optimizer`` that are not a seed's, in their order."""
    return [group for group in optimizer.param_groups if SLOT not in group]


def show_host_groups(optimizer: Optimizer, given: object = ()) -> None:
    """Lets all schedules of ``optimizer`` see the host's groups only.

    Args:
        optimizer: the innermost one.
        given: one schedule or several. They need an attribute ``optimizer``, or a ``scheduler`` that has one. Those of
            torch and timm, and others that keep one number for each group, are found if they are not given.

    Raises:
        ConfigError: ``given`` has something that is no schedule of ``optimizer``.
    """
    schedules: list[Any] = [given]
    if isinstance(given, Iterable) and not hasattr(given, "step"):
        schedules = list(given)
    for schedule in schedules:
        _limit(_of_optimizer(schedule, optimizer), optimizer)
    for schedule in _alive(optimizer):
        _limit(schedule, optimizer)


def in_order(
    optimizer: Optimizer,
    state: dict[str, Any],
) -> dict[str, Any] | None:
    """Puts the groups of a saved ``state`` in the order of those of ``optimizer``, by slot.

    Seeds, and a loop that adds groups of its own, add them in another order after a resume than in one go.

    Raises ConfigError if the state has other seeds than the optimizer.
    """
    saved = state["param_groups"]
    slots = _slots_of(optimizer.param_groups)
    saved_slots = _slots_of(saved)
    if saved_slots == slots:
        return None
    saved_seeds = set(saved_slots) - {None}
    seeds = set(slots) - {None}
    if saved_seeds != seeds:
        raise ConfigError(
            f"the optimizer's state has {_named(saved_seeds)}, and the optimizer has {_named(seeds)}: load the "
            "Grower's state first, which plants the seeds, then the optimizer's of the same epoch"
        )
    if len(saved) != len(slots):
        return None  # torch reports it
    # Groups of the host have no slot, and stay in their order: the last of a list is the next to be taken.
    waiting: defaultdict[str | None, list[Group]] = defaultdict(list)
    for group in reversed(saved):
        waiting[group.get(SLOT)].append(group)
    return {**state, "param_groups": [waiting[slot].pop() for slot in slots]}


def _slots_of(groups: list[Group]) -> list[Any]:
    """Returns the slot of each group, None for one of the host."""
    return [group.get(SLOT) for group in groups]


def _named(slots: set[Any]) -> str:
    if not slots:
        return "no seeds"
    return f"seeds in {', '.join(sorted(slots))}"


def _of_optimizer(schedule: Any, optimizer: Optimizer) -> Any:
    """Returns the object in ``schedule`` that sets rates of ``optimizer``. Raises ConfigError if there is none."""
    inner = schedule
    while inner is not None and not _is_of(getattr(inner, "optimizer", None), optimizer):
        inner = getattr(inner, "scheduler", None)
    if inner is None:
        raise ConfigError(
            f"scheduler= is a {type(schedule).__name__}, whose .optimizer is not the optimizer of this Grower. If it "
            "is a function or sets rates by itself, leave it out, and let it set those of the host: "
            'for group in [g for g in optimizer.param_groups if "slot" not in g]: group["lr"] = ...'
        )
    return inner


def _is_of(held: Any, optimizer: Optimizer) -> bool:
    """Whether what a schedule holds as its optimizer is ``optimizer``, wrapped or not."""
    return innermost(held) is optimizer


def _limit(schedule: Any, optimizer: Optimizer) -> None:
    """Lets a schedule, and those in it, see the host's groups only, and forget the numbers that it keeps for others."""
    for inner in getattr(schedule, "_schedulers", ()):
        _limit(inner, optimizer)
    if isinstance(schedule.optimizer, HostGroups):
        return
    groups = optimizer.param_groups
    for name, values in list(vars(schedule).items()):
        if not PER_GROUP.fullmatch(name):
            continue
        if isinstance(values, list) and len(values) == len(groups):
            kept = [value for value, group in zip(values, groups, strict=True) if SLOT not in group]
            setattr(schedule, name, kept)
    schedule.optimizer = HostGroups(schedule.optimizer)


def _alive(optimizer: Optimizer) -> Iterator[Any]:
    """Yields the schedules of ``optimizer`` that exist; an optimizer does not know them."""
    kinds: dict[type, Callable[[Any], bool] | None] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in kinds:
            kinds[kind] = _test_of(kind, len(optimizer.param_groups))
        test = kinds[kind]
        if test is None or not _is_of(vars(thing).get("optimizer"), optimizer):
            continue
        if test(thing):
            yield thing


def _test_of(kind: type, groups: int) -> Callable[[Any], bool] | None:
    """Returns a test whether an object of this class is a schedule; None if none is."""
    if issubclass(kind, LRScheduler) or any(base.__module__ == TIMM for base in kind.__mro__):
        return lambda _schedule: True
    has_step = callable(getattr(kind, "step", None))
    has_attributes = kind.__dictoffset__ != 0
    if not has_step or not has_attributes or hasattr(kind, "zero_grad"):
        return None
    return lambda thing: _keeps_numbers(thing, groups)


def _keeps_numbers(thing: Any, groups: int) -> bool:
    """Whether an object keeps one number for each group, and trains no network itself, as a trainer would."""
    attributes = vars(thing).values()
    if any(isinstance(value, nn.Module) for value in attributes):
        return False
    for values in attributes:
        if not isinstance(values, list | tuple) or len(values) != groups:
            continue
        if all(isinstance(entry, Number | Tensor) for entry in values):
            return True
    return False
