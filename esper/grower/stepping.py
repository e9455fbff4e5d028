"""Optimizers and schedules of user loops: the objects inside wrappers, hooks around a step, views without seeds."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.config import ConfigError
from esper.grower.checks import SLOT as SLOT
from esper.grower.checks import require_known

PER_GROUP = re.compile(r"base.*|.*lrs?|.*(lambdas|momentums|values|rates)|warmup_steps")
"""Names under which schedules keep lists with an entry for each group."""

UNFIT = {
    "torch.LBFGS": "it updates one group only",
    "torch.Muon": "it updates matrices only, and seeds have parameters of any shape; if another optimizer updates the "
    "other parameters, pass that one",
    "torch.SparseAdam": "it updates parameters with sparse gradients only",
    "torch.ZeroRedundancyOptimizer": "it divides the parameters that it was made with among the ranks",
    "timm.Adahessian": "it knows only the parameters that it was made with",
}
"""Optimizers of torch and timm that cannot update seeds, and why."""

AROUND = ("optimizer", "base_optimizer", "whole")
"""Attributes of wrappers that leave each step to the optimizer inside: those of accelerate, of sharpness-aware
minimization, and of the views that schedules have."""
BESIDE = ("_base_optimizer", "base")
"""Attributes of wrappers whose step goes on after the inner one, as timm's Lookahead and schedulefree's wrappers do."""

BY_ITSELF = (
    "If a function or the loop itself sets rates, pass scheduler=(), and let it set those of the host: "
    'for group in [g for g in optimizer.param_groups if "slot" not in g]: group["lr"] = ...'
)
Group = dict[str, Any]
Before = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
After = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


def inside(wrapper: object, attributes: tuple[str, ...]) -> Any:
    """Returns the object in the innermost of nested wrappers with these attributes, or ``wrapper`` itself."""
    for name in attributes:
        inner = getattr(wrapper, name, None)
        if inner is not wrapper and callable(getattr(inner, "step", None)):
            return inside(inner, attributes)
    return wrapper


def innermost(optimizer: object) -> Any:
    """Returns the optimizer in all wrappers of ``optimizer``, or ``optimizer`` itself, whatever it is."""
    return inside(optimizer, AROUND + BESIDE)


def unwrapped(optimizer: object) -> Optimizer:
    """Returns the torch optimizer inside ``optimizer``, which may be wrapped, or whose step may be part of another.

    Raises ConfigError without an optimizer, or for an optimizer that cannot update seeds.
    """
    inner = innermost(optimizer)
    if not isinstance(inner, Optimizer):
        raise ConfigError(f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    kind = type(inner)
    library = kind.__module__.partition(".")[0]
    name = kind.__name__
    reason = UNFIT.get(f"{library}.{name}")
    if reason is not None:
        raise ConfigError(f"{name} cannot update seeds: {reason}; or use another optimizer, such as AdamW or SGD")
    return inner


def hook_steps(
    optimizer: object,
    before: Before,
    after: After,
) -> None:
    """Calls ``before`` and ``after`` around each step of ``optimizer``, with the arguments of torch's step hooks.

    The hooks stay for the optimizer's life.
    """
    stepped = inside(optimizer, AROUND)
    if isinstance(stepped, Optimizer) and hasattr(type(stepped).step, "hooked"):
        stepped.register_step_pre_hook(before)
        stepped.register_step_post_hook(after)
        return
    # Lookahead and the wrappers of schedulefree do not run torch's hooks, and read gradients before and after the
    # inner step. A method, because schedulers of torch wrap the function of one.
    step = stepped.step

    def hooked(self: Any, *arguments: Any, **keywords: Any) -> Any:
        passed: tuple[Any, ...] = (self, *arguments)
        if self is not stepped:  # a copy
            return type(self).step(*passed, **keywords)
        changed = before(self, passed, keywords)
        if changed is not None:
            passed, keywords = changed
        result = step(*passed[1:], **keywords)
        after(self, passed, keywords)
        return result

    stepped.step = MethodType(hooked, stepped)


def scaler_of_step(scaler: torch.amp.GradScaler | None, *optimizers: object) -> torch.amp.GradScaler | None:
    """Returns ``scaler`` if it has unscaled the gradients of one of ``optimizers`` for the present step, else None."""
    if scaler is None:
        return None
    for optimizer in optimizers:
        state = scaler._per_optimizer_states.get(id(optimizer))
        if state is not None and state["found_inf_per_device"]:
            return scaler
    return None


def unscaling(scaler: torch.amp.GradScaler | None, optimizer: object) -> Tensor | None:
    """Returns the factor, a scalar, that undoes the scale of gradients that ``scaler`` has not seen.

    None: nothing is to be undone, because there is no scaler, or because the step itself does so, as fused ones do.
    """
    if scaler is None or getattr(optimizer, "grad_scale", None) is not None:
        return None
    scale = scaler._get_scale_async()
    if scale is None:
        return None
    return scale.double().reciprocal().float()


class HostGroups:
    """An optimizer without the groups of seeds: what a schedule sees of it.

    Schedules keep one base rate for each group that existed when they were made, and fail or drift if others come and
    go. A view equals its optimizer, so that libraries find which optimizer a schedule belongs to.
    """

    def __init__(self, optimizer: Any) -> None:
        self.whole = optimizer

    @property
    def param_groups(self) -> list[Group]:
        return _Groups(host_groups(self.whole), _followers.get(innermost(self.whole), []))

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
        follow: list[WeakMethod[Callable[[], None]]],
    ) -> None:
        super().__init__(groups)
        self._follow = follow

    def __iter__(self) -> Iterator[Group]:
        yield from super().__iter__()
        for reference in self._follow:
            follow = reference()
            if follow is not None:
                follow()


_followers: WeakKeyDictionary[Optimizer, list[WeakMethod[Callable[[], None]]]] = WeakKeyDictionary()


def follow_schedules(optimizer: Optimizer, follow: Callable[[], None]) -> None:
    """Calls the method ``follow`` whenever a schedule of ``optimizer`` has set rates."""
    known = [reference for reference in _followers.get(optimizer, []) if reference() is not None]
    _followers[optimizer] = [*known, WeakMethod(follow)]


_labels: WeakKeyDictionary[Optimizer, WeakKeyDictionary[object, list[str]]] = WeakKeyDictionary()
"""Values of ``SLOT`` in an optimizer's groups, by what owns the groups and is not closed."""
_given: WeakKeyDictionary[Optimizer, set[str]] = WeakKeyDictionary()
"""Values of ``SLOT`` that Growers have ever given to groups of an optimizer."""


def label_slots(optimizer: Optimizer, owner: object, slots: Iterable[str]) -> dict[str, str]:
    """Returns the values of ``SLOT`` in the groups of seeds of ``owner`` by slot: no other groups have them.

    Several Growers may share an optimizer, as those of an actor and a critic: from the second on, labels have a number.
    Groups of seeds that an earlier Grower has kept are renamed.
    """
    require_known(optimizer, _given.get(optimizer, ()))
    owners = _labels.setdefault(optimizer, WeakKeyDictionary())
    taken = {label for labels in owners.values() for label in labels}
    labels = {slot: slot for slot in slots}
    number = 1
    while taken.intersection(labels.values()):
        number += 1
        labels = {slot: f"{slot} of Grower {number}" for slot in labels}
    for group in optimizer.param_groups:
        if SLOT in group and group[SLOT] not in taken:
            group[SLOT] = f"kept {group[SLOT]}"
    owners[owner] = list(labels.values())
    _given.setdefault(optimizer, set()).update(labels.values())
    return labels


def free_labels(optimizer: Optimizer, owner: object) -> None:
    """Ends what :func:`label_slots` began: a new owner may have the labels."""
    _labels[optimizer].pop(owner, None)


def host_groups(optimizer: Any) -> list[Group]:
    """Returns the parameter groups of ``optimizer`` that are not a seed's, in their order."""
    return [group for group in optimizer.param_groups if SLOT not in group]


def show_host_groups(optimizer: Optimizer, given: object) -> list[Any]:
    """Lets schedules see the host's groups only, and returns the objects that set rates.

    Args:
        optimizer: the innermost one.
        given: one schedule or several. Each needs an attribute ``optimizer``, or a ``scheduler`` that has one.

    Raises:
        ConfigError: ``given`` has something that is no schedule of ``optimizer``.
    """
    schedules: list[Any] = [given]
    if isinstance(given, Iterable) and not hasattr(given, "step"):
        schedules = list(given)
    found = [_of_optimizer(schedule, optimizer) for schedule in schedules]
    for schedule in found:
        limit(schedule, optimizer)
    return found


def has_torch_schedule(*optimizers: object) -> bool:
    """Whether a learning-rate schedule of torch was ever made for one of these: torch marks the ``step`` of each."""
    return any(hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched") for optimizer in optimizers)


def mark(value: Any) -> Any:
    """Returns an object that tells whether ``value`` has changed since; tensors are not read."""
    if isinstance(value, Tensor):
        return id(value), value._version
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return copy.copy(value)


def rates_of(optimizer: Any) -> list[Any]:
    """Returns a mark of the learning rate of each of the host's groups."""
    return [mark(group["lr"]) for group in host_groups(optimizer)]


def require_same_rates(before: list[Any] | None, now: list[Any]) -> None:
    """Raises ConfigError if a rate has changed between two steps, though no schedule is known."""
    if before is None or len(before) != len(now):
        return
    for index, (old, new) in enumerate(zip(before, now, strict=True)):
        if old != new:
            raise ConfigError(
                f"the learning rate of parameter group {index} changed between two steps ({old} to {new}), and the "
                f"Grower knows no schedule: pass the object that sets it as scheduler=. {BY_ITSELF}"
            )


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
    """Returns the object in ``schedule`` that sets rates of ``optimizer``; ConfigError without such an object."""
    inner = schedule
    while inner is not None and not _is_of(getattr(inner, "optimizer", None), optimizer):
        inner = getattr(inner, "scheduler", None)
    if inner is None:
        raise ConfigError(
            f"scheduler= is a {type(schedule).__name__}, whose .optimizer is not the optimizer of this Grower. "
            f"{BY_ITSELF}"
        )
    return inner


def _is_of(held: Any, optimizer: Optimizer) -> bool:
    """Whether what a schedule holds as its optimizer is ``optimizer``, wrapped or not."""
    return innermost(held) is optimizer


def limit(schedule: Any, optimizer: Optimizer) -> None:
    """Lets a schedule, and those in it, see the host's groups only, and forget the numbers that it keeps for others."""
    for inner in getattr(schedule, "_schedulers", ()):
        limit(inner, optimizer)
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


def move_state(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Moves the state of ``parameters`` to their device, and what has their shape to their dtype."""
    for parameter in parameters:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                optimizer.state[parameter][key] = value.to(parameter)


TRIAL_STEPS = 3
"""Steps of the trial of an optimizer: some adapt a common rate from the second on."""


def require_groups_apart(optimizer: Optimizer) -> None:
    """Raises ConfigError if a step on one parameter group depends on the gradients of another.

    Optimizers do so that clip by the norm of all gradients, as timm's LAMB does, or that estimate one rate for all. A
    seed that only learns would then change the training of the model. It is tried with an optimizer of the same class
    and options on two small parameters; one that cannot be tried so is taken.
    """
    try:
        beside_small = _after_trial(optimizer, scale=1.0)
        beside_large = _after_trial(optimizer, scale=1000.0)
    except Exception:  # whatever the step of a user's class needs
        return
    if not torch.equal(beside_small, beside_large):
        name = type(optimizer).__name__
        raise ConfigError(
            f"a step of {name} on a parameter group depends on the gradients of other groups, as if it clips by the "
            "norm of all gradients or estimates one rate for all: seeds would change how the model trains. Switch that "
            "off (max_grad_norm=None in LAMB, and clip in the loop), or use another optimizer, such as AdamW"
        )


def _after_trial(optimizer: Optimizer, scale: float) -> Tensor:
    """Returns a parameter after a few steps of an optimizer like ``optimizer``, beside a group with ``scale`` times as
    large gradients."""
    trial: Any = copy.copy(optimizer)  # torch's classes copy options, groups and state, and no hooks
    trial.state = defaultdict(dict)
    trained = nn.Parameter(torch.ones(4, 4, dtype=torch.float32, device="cpu"))
    other = nn.Parameter(torch.ones(4, 4, dtype=torch.float32, device="cpu"))
    options = optimizer.param_groups[0]
    trial.param_groups = [_options_of(options, trained), _options_of(options, other)]
    generator = torch.Generator("cpu").manual_seed(0)
    with warnings.catch_warnings(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        for _ in range(TRIAL_STEPS):
            trained.grad = torch.randn(4, 4, generator=generator, dtype=torch.float32, device="cpu")
            other.grad = scale * trained.grad.flip(0)
            trial.step()
    return trained.detach()


def _options_of(group: Group, parameter: nn.Parameter) -> Group:
    """Returns the options of ``group`` for a new ``parameter`` on the CPU."""
    options: Group = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        if isinstance(value, Tensor):
            value = value.detach().cpu()
        options[key] = copy.deepcopy(value)
    options["params"] = [parameter]
    for key in ("capturable", "fused"):
        if key in options:
            options[key] = False
    return options


NOT_INHERITED = ("params", "param_names", "lr", "initial_lr", "weight_decay", SLOT)
"""Options of a group that a seed's group does not copy."""


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


def arguments_of(optimizer: Optimizer) -> tuple[str, ...]:
    """Returns the options of groups that an optimizer's class takes as arguments, and seeds inherit.

    Loops and schedules change these, as OneCycleLR does betas. The others are an optimizer's own, such as counters.
    """
    arguments = inspect.signature(type(optimizer).__init__).parameters
    options = set().union(*optimizer.param_groups)
    return tuple(key for key in arguments if key in options and key not in NOT_INHERITED)


class StepCounters:
    """Options of an optimizer's groups that its steps change, such as a counter, which are no seed's to begin with."""

    LOOKS = 4
    """Steps of an epoch after which changed options are looked for, as that costs time."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._looks = self.LOOKS
        self._before: dict[str, Any] = {}

    def look(self) -> None:
        """Compares options in the next steps."""
        self._looks = self.LOOKS

    def before_step(self, optimizer: Optimizer) -> None:
        if self._looks:
            self._before = _marked(host_groups(optimizer)[0])

    def after_step(self, optimizer: Optimizer) -> None:
        if not self._looks:
            return
        self._looks -= 1
        for key, value in _marked(host_groups(optimizer)[0]).items():
            if key not in self._before or value != self._before[key]:
                self.names.add(key)


def _marked(group: Group) -> dict[str, Any]:
    """Returns the options of a group, so that two of them tell which have changed; tensors are not read."""
    marks: dict[str, Any] = {}
    for key, value in group.items():
        if key in NOT_INHERITED:
            continue
        marks[key] = mark(value)
    return marks
