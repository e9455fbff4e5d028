"""Seeds in a network that stays what it was: forward hooks add them, and one container registers them.

A grown submodule keeps its identity, class, attributes, names and state-dict keys. The same hooks act while a seed
grows and after it is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, fx, nn

from esper.config import ConfigError
from esper.core.blend import Seed
from esper.hosts.container import CONTAINER, NOT_SCRIPTED, container_of, forget_copied, unregister_seed
from esper.hosts.inputs import features_of, with_features
from esper.hosts.sources import SitePath, SourceFrame, hook_site

COPIES: dict[str, WeakSet[SeedHook]] = {}
"""Hooks in copies of models, such as averages of their weights, by the growth that made the original."""


IDLE: WeakKeyDictionary[nn.Module, list[SeedHook]] = WeakKeyDictionary()
"""Hooks of growing models that are not registered at the moment, because nothing happens at their sites, by sink."""


class Growth(Protocol):
    """The growing seeds of a model, which its hooks ask in each pass."""

    def grown(self, hook: SeedHook, module: nn.Module, output: object) -> object:
        """Returns the ``output`` of the submodule ``module`` with the seed as it takes part in this pass."""

    def reads(self, hook: SeedHook) -> bool:
        """Whether the source of the present pass is needed."""

    def present(self, slot: str) -> tuple[Seed | None, float, dict[str, Any]]:
        """Returns the seed that is on, if any, its alpha, and its recipe, see :attr:`SeedHook.recipe`."""

    def planted(self, slot: str) -> tuple[Seed | None, float]:
        """Returns the seed that is planted, on or not, and its alpha."""


class SeedHook:
    """Forward hook that turns the output h of a submodule into h + alpha · d(s); of a tuple, the first tensor.

    The source s is h itself, or what ``frame`` has kept. While a seed grows, ``growth`` decides what it does. Copies
    and pickles hold the seed and the alpha of that moment.
    """

    def __init__(
        self,
        name: str,
        seed: Seed | None = None,
        alpha: float = 0.0,
    ) -> None:
        self.name = name
        """Name of the seed in the container."""
        self.frame: SourceFrame | None = None
        """Keeps the source; None: the seed reads h."""
        self.seed = seed
        """Maps features h to d(h), of the same shape; None: the hook does nothing."""
        self.alpha = alpha
        """Share of the seed, 0 to 1."""
        self.growth: Growth | None = None
        """Decides while the seed grows."""
        self.slot = ""
        """Name of the slot in ``growth``."""
        self.in_average = False
        """Whether the hook lies in an average of the weights of the model that grows."""
        self.recipe: dict[str, Any] = {}
        """Names of the seed's blueprint, topology and blend style, its number of channels, and the layers between its
        source and its sink if it has a source, where known."""
        self.origin = ""
        """Identifies the growth that made the hook, in copies too."""

    def __call__(
        self,
        module: nn.Module,
        _inputs: tuple[Any, ...],
        output: Any,
    ) -> Any:
        if self.growth is not None:
            return self.growth.grown(self, module, output)
        if self.seed is None:
            return output
        h: Any = features_of(output)
        source = self.source(h)
        delta: Any
        if type(h) is fx.Proxy:  # torch.fx traces the network: the seed is a call of a module
            delta = h.tracer.create_proxy("call_module", h.tracer.path_of_module(self.seed), (source,), {})  # type: ignore[attr-defined]
        else:
            delta = self.seed(source)
        return with_features(output, with_share(h, delta, self.alpha))

    @property
    def __name__(self) -> str:
        # A hack: torch.jit.script asks hooks for their names before it fails. To all others, a hook has none.
        raise AttributeError(NOT_SCRIPTED)

    def source(self, h: Tensor) -> Tensor:
        """Returns the features that a seed reads in the present pass, in which the sink is ``h``."""
        if self.frame is None:
            return h
        return self.frame.take()

    @property
    def at_site(self) -> tuple[Seed | None, float]:
        """The seed at its site, which may still grow, and its alpha."""
        if self.growth is None:
            return self.seed, self.alpha
        return self.growth.planted(self.slot)

    @property
    def reads(self) -> bool:
        if self.growth is None:
            return self.seed is not None
        return self.growth.reads(self)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self.growth is not None:
            state["growth"] = None
            state["seed"], state["alpha"], state["recipe"] = self.growth.present(self.slot)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.origin in COPIES:
            COPIES[self.origin].add(self)


def with_share(h: Tensor, delta: Tensor, alpha: float) -> Tensor:
    """Returns h + alpha · delta in the dtype of the features ``h``; under autocast a delta may have another one."""
    return torch.add(h, delta.to(h.dtype), alpha=alpha)


def register(model: nn.Module, path: SitePath, hook: SeedHook) -> None:
    """Registers ``hook`` at ``path``, after the hooks that the submodules have.

    torch numbers hooks from 0 in each process, so a hook that is registered after a network was loaded could replace
    one of the network's. A key that is no number cannot be replaced so.
    """
    _wake(model.get_submodule(path.sink), hook)
    hook.frame = None
    if path.source is not None:
        hook.frame = SourceFrame(path, hook)
    for number, (module, handle) in enumerate(hook_site(model, path, hook, hook.frame)):
        key = key_of(hook.name)
        if hook.frame is not None:
            key = f"{key}.{number}"
        for hooks in _hooks_of_torch(module):
            if handle.id in hooks:
                hooks[key] = hooks.pop(handle.id)


def unregister(model: nn.Module, hook: SeedHook) -> None:
    """Removes ``hook`` from the submodules of ``model``, and those that keep its source."""
    for module in model.modules():
        _wake(module, hook)
        present = {**module._forward_pre_hooks, **module._forward_hooks}
        for key, other in present.items():
            keeps_source = hook.frame is not None and getattr(other, "__self__", None) is hook.frame
            if other is not hook and not keeps_source:
                continue
            for hooks in _hooks_of_torch(module):
                hooks.pop(key, None)


def rest(model: nn.Module, path: SitePath, hook: SeedHook) -> None:
    """Removes ``hook`` until it is registered at ``path`` again; :func:`hooks_of` still yields it."""
    unregister(model, hook)
    IDLE.setdefault(model.get_submodule(path.sink), []).append(hook)


def _wake(sink: nn.Module, hook: SeedHook) -> None:
    """Forgets that ``hook`` rests at ``sink``."""
    if hook in IDLE.get(sink, ()):
        IDLE[sink].remove(hook)


def _hooks_of_torch(module: nn.Module) -> list[dict[Any, Any]]:
    """Returns the dicts of a module in which a key stands for one hook."""
    return [
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ]


def key_of(name: str) -> str:
    """Returns the key of a seed's hook among the hooks of its submodule, or the beginning of those of several hooks."""
    return f"{CONTAINER}.{name}"


def free_name(model: nn.Module, slot: str) -> str:
    """Returns ``slot``, with a number behind it if another seed of ``model`` has that name."""
    taken = {hook.name for _, _, hook in hooks_of(model)}
    name = slot
    number = 2
    while name in taken:
        name = f"{slot}_{number}"
        number += 1
    return name


def attach(
    model: nn.Module,
    seeds: Mapping[str, tuple[str, Seed, float]],
    recipes: Mapping[str, dict[str, Any]] = MappingProxyType({}),
) -> list[SeedHook]:
    """Adds finished seeds to ``model``: by path of the site, the slot, the seed and its alpha.

    ``recipes`` describes them by path, where known. Returns their hooks.
    """
    hooks = []
    for path, (slot, seed, alpha) in seeds.items():
        hook = SeedHook(free_name(model, slot))
        hook.recipe = dict(recipes.get(path, {}))
        register(model, SitePath.parse(path), hook)
        keep(model, hook, seed, alpha)
        hooks.append(hook)
    return hooks


def keep(model: nn.Module, hook: SeedHook, seed: Seed, alpha: float) -> None:
    """Makes ``seed`` a part of ``model`` for good, added by its ``hook``, in the model's mode."""
    hook.growth = None
    hook.seed = seed.requires_grad_(True)
    hook.alpha = alpha
    container_of(model, path_of(model, hook).sink).add_module(hook.name, seed.train(model.training))


def detach(model: nn.Module, hook: SeedHook) -> None:
    """Removes a finished seed from ``model``."""
    unregister(model, hook)
    unregister_seed(model, hook.seed)


def hooks_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, SeedHook]]:
    """Yields the path, the submodule and the hook of each seed in ``model``, in the order of its modules."""
    for path, module in list(model.named_modules()):
        for hook in [*module._forward_hooks.values(), *IDLE.get(module, ())]:
            if isinstance(hook, SeedHook):
                yield path, module, hook


def path_of(model: nn.Module, hook: SeedHook) -> SitePath:
    """Returns where ``hook`` lies in ``model``, which may be a part of the network that has grown, or hold it."""
    sink = next(path for path, _, present in hooks_of(model) if present is hook)
    if hook.frame is None:
        return SitePath(sink)
    for path, module in model.named_modules():
        if hook.frame.keep in module._forward_pre_hooks.values():
            return SitePath(sink, path)
    return SitePath(sink)


def recipe_in(model: nn.Module, hook: SeedHook) -> dict[str, Any]:
    """Returns all that is needed to make the seed of ``hook`` and its hooks again in another model like ``model``."""
    copied = hook.__getstate__()
    path = path_of(model, hook)
    recipe = dict(copied["recipe"])
    if hook.frame is not None and "between" in recipe:
        recipe["between"] = [_moved(part, hook.frame.path.sink, path.sink) for part in recipe["between"]]
    if copied["seed"] is not None and copied["seed"].leading is not None:
        recipe["leading"] = copied["seed"].leading
    return {"path": str(path), "name": hook.name, "alpha": copied["alpha"], **recipe}


def _moved(part: Mapping[str, Any], before: str, now: str) -> Mapping[str, Any]:
    """Returns a layer of a site whose sink was called ``before`` in the network that grew, and is called ``now``."""
    if before == now:
        return part
    moved = dict(part)
    if "path" in part:
        moved["path"] = _renamed(part["path"], before, now)
    if "returned_by" in part:
        moved["returned_by"] = [_renamed(path, before, now) for path in part["returned_by"]]
    return moved


def _renamed(path: str, before: str, now: str) -> str:
    if now.endswith(before):
        return now.removesuffix(before) + path
    return path.removeprefix(before.removesuffix(now))


def require_finished(model: nn.Module) -> None:
    """Raises ConfigError if a growth of ``model``, or of a part of it, is not finished."""
    for path, _, hook in hooks_of(model):
        if hook.growth is not None:
            raise ConfigError(
                f"another Grower grows this model, at {path or 'the model itself'}: call its finish(), or its close() "
                "to drop its seeds; if it is lost, make the model anew"
            )


def without_copied_hooks(network: nn.Module, origin: str) -> None:
    """Removes the hooks and seeds that ``network`` has as a copy of a model during the growth ``origin``, and hooks
    without a seed of any other growth."""
    COPIES[origin] -= set(forget_copied(network))
    for _, _, hook in hooks_of(network):
        if hook.growth is not None or (hook.seed is not None and hook.origin != origin):
            continue
        COPIES[origin].discard(hook)
        detach(network, hook)
