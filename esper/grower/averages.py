"""Averages of a model's weights, which get the seeds that the model gets."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from esper.config import ConfigError
from esper.hosts.seed_hook import hooks_of


def given_averages(averages: Iterable[nn.Module] | None, model: nn.Module) -> list[nn.Module]:
    """Returns the networks of these averages; None: those that are found, see :func:`found_averages`.

    Raises ConfigError for an average of another network.
    """
    if averages is None:
        return found_averages(model)
    networks = [network if _alike(network, model) else _inner(network) for network in averages]
    for network in networks:
        if network is None or not _alike(network, model):
            raise ConfigError(
                "averages= has a network whose parameters are not those of the model: pass the averages of this model, "
                "such as torch.optim.swa_utils.AveragedModel(model), or copies of it"
            )
    return [network for network in networks if network is not None]


def found_averages(model: nn.Module) -> list[nn.Module]:
    """Returns the networks of averages such as torch's ``AveragedModel`` and timm's ``ModelEma`` that hold a copy of
    ``model``: they have its weights, as long as neither was trained.

    Raises ConfigError for another one that fits, since it may belong to another network of the same class.
    """
    alike = _candidates(model)
    fresh = [network for network in alike if _equal(network, model)]
    if alike and not fresh:
        gc.collect()  # what an earlier run has left behind
        alike = _candidates(model)
    if alike and not fresh:
        raise ConfigError(
            "an average of weights fits this model, but it has other weights, so it may belong to another one: pass "
            "averages=[...] with those of this model, or averages=[] if there is none"
        )
    return fresh


def averages_made_since(origin: str) -> list[nn.Module]:
    """Returns the networks of averages that were copied from a model while the growth ``origin`` had hooks in it."""
    return [network for network in _wrapped() if any(hook.origin == origin for _, _, hook in hooks_of(network))]


def _candidates(model: nn.Module) -> list[nn.Module]:
    """Returns the networks that could be averages of ``model``, without those that follow another growth."""
    networks = [network for network in _wrapped() if network is not model and _alike(network, model)]
    return [network for network in networks if all(hook.growth is None for _, _, hook in hooks_of(network))]


def _wrapped() -> Iterator[nn.Module]:
    """Yields the networks inside all live modules that average weights."""
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, nn.Module) and (hasattr(kind, "update_parameters") or hasattr(kind, "update")):
            network = _inner(thing)
            if network is not None:
                yield network


def _inner(average: nn.Module) -> nn.Module | None:
    network = average._modules.get("module")
    return network if isinstance(network, nn.Module) else None


def _alike(network: nn.Module, model: nn.Module) -> bool:
    """Whether two networks have one class, and parameters of the same names and shapes."""
    if type(network) is not type(model):
        return False
    mine, other = dict(network.named_parameters()), dict(model.named_parameters())
    if list(mine) != list(other) or any(_is_lazy(p) for p in (*mine.values(), *other.values())):
        return False
    return all(mine[name].shape == other[name].shape for name in mine)


def _is_lazy(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, nn.parameter.UninitializedParameter)


@torch.no_grad()
def _equal(network: nn.Module, model: nn.Module) -> bool:
    pairs = zip(network.parameters(), model.parameters(), strict=True)
    return all(torch.equal(mine, other.to(mine.device, mine.dtype)) for mine, other in pairs)
