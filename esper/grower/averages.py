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
    networks = []
    for average in averages:
        network = average if _alike(average, model) else _inner(average)
        if network is None or not _alike(network, model):
            raise ConfigError(
                "averages= has a network whose parameters are not those of the model: pass the averages of this model, "
                "such as torch.optim.swa_utils.AveragedModel(model), or copies of it"
            )
        networks.append(network)
    return networks


def found_averages(model: nn.Module) -> list[nn.Module]:
    """Returns the networks of averages such as torch's ``AveragedModel`` and timm's ``ModelEma`` that hold a copy of
    ``model``: they have its weights, as long as neither was trained.

    Raises ConfigError for another one that fits, since it may belong to another network of the same class.
    """
    alike = _candidates(model)
    fresh = [network for network in alike if _equal(network, model)]
    if fresh or not alike:
        return fresh
    # An earlier run may have left averages behind that nothing but a cycle keeps alive.
    gc.collect()
    if _candidates(model):
        raise ConfigError(
            "an average of weights fits this model, but it has other weights, so it may belong to another one: pass "
            "averages=[...] with those of this model, or averages=[] if there is none"
        )
    return []


def averages_made_since(origin: str) -> list[nn.Module]:
    """Returns the networks of averages that were copied from a model while the growth ``origin`` had hooks in it."""
    copies = []
    for network in _wrapped():
        origins = [hook.origin for _, _, hook in hooks_of(network)]
        if origin in origins:
            copies.append(network)
    return copies


def _candidates(model: nn.Module) -> list[nn.Module]:
    """Returns the networks that could be averages of ``model``, without those that follow another growth."""
    networks = []
    for network in _wrapped():
        if network is model or not _alike(network, model):
            continue
        if all(hook.growth is None for _, _, hook in hooks_of(network)):
            networks.append(network)
    return networks


def _wrapped() -> Iterator[nn.Module]:
    """Yields the networks inside all live modules that average weights."""
    for thing in gc.get_objects():
        kind = type(thing)
        if not issubclass(kind, nn.Module):
            continue
        if not hasattr(kind, "update_parameters") and not hasattr(kind, "update"):
            continue
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
    shapes = _shapes(network)
    return shapes is not None and shapes == _shapes(model)


def _shapes(network: nn.Module) -> list[tuple[str, torch.Size]] | None:
    """Returns names and shapes of the parameters in order; None if a lazy one has no shape yet."""
    shapes = []
    for name, parameter in network.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            return None
        shapes.append((name, parameter.shape))
    return shapes


@torch.no_grad()
def _equal(network: nn.Module, model: nn.Module) -> bool:
    for average, parameter in zip(network.parameters(), model.parameters(), strict=True):
        alike = parameter.to(average.device, average.dtype)
        if not torch.equal(average, alike):
            return False
    return True
