"""The averages of gradients that optimizers keep go along when seeds become a part of their layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.core.blueprints.source import RANKS
from esper.hosts.widen import SourceSeed, merge_sources

Network = TypeVar("Network", bound=nn.Module)

POWERS = {
    "momentum_buffer": 1,
    "exp_avg": 1,
    "grad_avg": 1,
    "exp_avg_sq": 2,
    "max_exp_avg_sq": 2,
    "sum": 2,
    "square_avg": 2,
}
"""The power of the gradient that a state of torch's optimizers averages, by its name."""

BETAS = {"exp_avg": 0, "exp_avg_sq": 1, "max_exp_avg_sq": 1}
"""Index of the decay among a group's ``betas`` of averages that start at zero, and are divided by 1 − β^steps."""


class Averages:
    """The averages of gradients that optimizers keep, by parameter."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._states: dict[Tensor, Mapping[str, Any]] = {}
        self._betas: dict[Tensor, Sequence[float]] = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._states[parameter] = optimizer.state.get(parameter, {})
                    self._betas[parameter] = group.get("betas", ())

    @property
    def keys(self) -> set[str]:
        """Names of the averages that some parameter has."""
        names: set[str] = set()
        for state in self._states.values():
            names |= POWERS.keys() & state.keys()
        return names

    def of(self, parameter: Tensor, key: str) -> Tensor | None:
        """Returns an average of a parameter's gradients, in its shape; None if the optimizer has no such average."""
        value = self._states.get(parameter, {}).get(key)
        return value if is_like(value, parameter) else None

    def factor(
        self,
        parameter: Tensor,
        layer: nn.Module,
        key: str,
    ) -> float:
        """Returns the factor by which the average of a new parameter becomes one of as many steps as its layer's.

        After t steps an average with decay β is 1 − β^t times what it will be in the long run, and the optimizer
        divides by that. In a layer of T steps it divides by 1 − β^T, so the factor is (1 − β^T) / (1 − β^t).
        """
        steps = self._steps(parameter)
        of_layer = max(map(self._steps, layer.parameters()), default=0.0)
        betas = self._betas.get(parameter, ())
        if key not in BETAS or not betas or not steps or not of_layer:
            return 1.0
        beta = float(betas[BETAS[key]])
        return float((1 - beta**of_layer) / (1 - beta**steps))

    def _steps(self, parameter: Tensor) -> float:
        return float(self._states.get(parameter, {}).get("step", 0.0))


def is_like(value: Any, parameter: Tensor) -> bool:
    """Returns whether ``value`` has an element for each element of a parameter."""
    return isinstance(value, Tensor) and parameter.dim() > 0 and value.shape == parameter.shape


def merged_averages(
    network: Network,
    seeds_of: Callable[[Network], Sequence[SourceSeed]],
    averages: Averages,
) -> Callable[[Mapping[str, str]], dict[str, dict[str, Tensor]]]:
    """Returns a function that merges the averages of ``network`` as its seeds are merged; call this before they are.

    The function takes the reasons for the seeds that stay, by name, and returns the averages by their names, then by
    those of the parameters. Merged layers count a seed's last weights alpha times, so that the gradient for them is
    1/alpha of what it was. A layer that takes up a LoRA keeps its own averages.
    """
    twins = {key: _twin(network, seeds_of, averages, key) for key in averages.keys}

    def merge(stay: Mapping[str, str]) -> dict[str, dict[str, Tensor]]:
        merged = {}
        for key, (twin, seeds) in twins.items():
            merge_sources(twin, seeds, lambda: None, stay)
            merged[key] = {name: value.data for name, value in twin.named_parameters()}
        return merged

    return merge


@torch.no_grad()
def _twin(
    network: Network,
    seeds_of: Callable[[Network], Sequence[SourceSeed]],
    averages: Averages,
    key: str,
) -> tuple[Network, list[SourceSeed]]:
    """Returns a copy of ``network`` whose parameters are averages, and its seeds."""
    twin = copy.deepcopy(network)
    for value, parameter in zip(twin.parameters(), network.parameters(), strict=True):
        average = averages.of(parameter, key)
        if average is None:
            value.zero_()
        else:
            value.copy_(average)
    seeds = []
    for seed, original in zip(seeds_of(twin), seeds_of(network), strict=True):
        for layer, more, of_seed in _with_layers(seed, original):
            more.mul_(averages.factor(of_seed, layer, key))
        if seed.blueprint in RANKS:
            seed.body.apply(_forget)
        alpha = seed.alpha ** -POWERS[key] if seed.alpha else 0.0
        seeds.append(replace(seed, alpha=alpha))
    return twin, seeds


def _forget(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.zero_()


def _with_layers(seed: SourceSeed, original: SourceSeed) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
    """Yields the layers of the original's place, with the parameters of both seeds that become parts of them."""
    layers = original.place.layers
    if len(layers) == 1:  # it takes up all of the seed
        layers *= len(list(original.body.children()))
    children = zip(layers, seed.body.children(), original.body.children(), strict=False)
    for layer, more, parameters in children:
        for value, parameter in zip(more.parameters(), parameters.parameters(), strict=True):
            yield layer, value, parameter
