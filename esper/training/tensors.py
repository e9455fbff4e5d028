"""Parameters and buffers of networks in training, by a list of their modules that is made once."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

from torch import Tensor, nn

_Listed = list[tuple[str, nn.Module | None, list[nn.Module | None]]]
"""Modules by prefix of their tensors' names, with their children as they were then; None is the network itself, which
would otherwise live as long as its list."""

_MODULES: WeakKeyDictionary[nn.Module, _Listed] = WeakKeyDictionary()


def parameters_of(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields what ``named_parameters()`` does."""
    return _tensors(network, "_parameters")


def buffers_of(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields what ``named_buffers()`` does."""
    return _tensors(network, "_buffers")


def _tensors(network: nn.Module, kind: str) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()  # a tensor of two modules comes once
    for prefix, module, _ in _modules_of(network):
        for name, tensor in vars(network if module is None else module)[kind].items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield prefix + name, tensor


def _modules_of(network: nn.Module) -> _Listed:
    listed = _MODULES.get(network)
    if listed is None or _has_changed(network, listed):
        listed = []
        for name, module in network.named_modules():
            prefix = f"{name}." if name else ""
            listed.append((prefix, None if module is network else module, _children(module)))
        _MODULES[network] = listed
    return listed


def _has_changed(network: nn.Module, listed: _Listed) -> bool:
    """Whether a module has other children than when it was listed."""
    for _, module, children in listed:
        modules = (network if module is None else module)._modules
        if (modules or children) and list(modules.values()) != children:  # most modules have none
            return True
    return False


def _children(module: nn.Module) -> list[nn.Module | None]:
    return list(module._modules.values())
