"""The averages of gradients that optimizers keep go along when seeds become a part of their layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.core.blueprints.adapted import RANKS, Adapted
from esper.hosts.widen import SourceSeed, merge_source

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


Key = tuple[nn.Module, str]
"""A parameter of a module, by its name there."""


def merged_averages(
    seeds: Sequence[SourceSeed],
    averages: Averages,
) -> Callable[[Collection[str]], dict[str, dict[Key, Tensor]]]:
    """Returns a function that merges averages as ``seeds`` are merged, in their order; call this before they are.

    The function takes the names of the seeds that stay, once the others are merged. It returns the averages by their
    names, then by the parameters of the layers at the places of ``seeds``, and of the seeds. Merged layers count a
    seed's last weights alpha times, so that the gradient for them is 1/alpha of what it was. Weights that take up a
    LoRA keep their own averages.
    """
    twins = {key: _twins(seeds, averages, key) for key in averages.keys}

    @torch.no_grad()
    def merge(stay: Collection[str]) -> dict[str, dict[Key, Tensor]]:
        merged = {}
        for key, (twins_of_seeds, modules) in twins.items():
            present = [twin.seed for twin in twins_of_seeds]
            for twin in twins_of_seeds:
                if twin.seed.name not in stay:
                    present.remove(twin.seed)
                    for layer, name, factor in twin.factors:
                        layer.get_parameter(name).mul_(factor)  # it may be another one since an earlier merge
                    merge_source(twin.seed, present)
            pairs = list(modules.items())
            for original, copied in modules.items():
                if isinstance(original, Adapted) and isinstance(copied, Adapted):
                    pairs += zip(original.adapter, copied.adapter, strict=True)  # it may be new
            merged[key] = {
                (original, name): value.detach()
                for original, copied in pairs
                for name, value in copied.named_parameters(recurse=False)
            }
        return merged

    return merge


@dataclass(frozen=True, eq=False)
class _SeedOfAverages:
    """A seed whose parameters, and those of the layers at its place, are averages."""

    seed: SourceSeed
    factors: tuple[tuple[nn.Module, str, float], ...]
    """Averages of the seed, by module and name, with the factors by which they become those of its layers."""


@torch.no_grad()
def _twins(
    seeds: Sequence[SourceSeed],
    averages: Averages,
    key: str,
) -> tuple[list[_SeedOfAverages], dict[nn.Module, nn.Module]]:
    """Returns ``seeds`` with averages in place of parameters, and the copy of each of their modules."""
    modules: dict[nn.Module, nn.Module] = {}
    twins = []
    for seed in seeds:
        layers = tuple(twin_of(layer, averages, key, modules) for layer in seed.place.layers)
        body = twin_of(seed.body, averages, key, modules)
        twin = replace(
            seed,
            place=replace(seed.place, layers=layers),
            body=body,
            alpha=seed.alpha ** -POWERS[key] if seed.alpha else 0.0,
            inside=(),
            remove=_nothing,
        )
        factors = []
        for layer, original in _with_layers(seed):
            in_weights = seed.blueprint in RANKS and not seed.beside
            for name, parameter in original.named_parameters():
                factor = 0.0 if in_weights else averages.factor(parameter, layer, key)
                factors.append((modules[original], name, factor))
        twins.append(_SeedOfAverages(twin, tuple(factors)))
    return twins, modules


def twin_of(
    module: nn.Module,
    averages: Averages,
    key: str,
    modules: dict[nn.Module, nn.Module],
) -> nn.Module:
    """Returns a module of the same class and attributes whose parameters are averages, and notes it in ``modules``.

    Averages that do not exist are zero. It has no hooks, and none of them runs.
    """
    if module in modules:
        return modules[module]
    twin: nn.Module = object.__new__(type(module))
    nn.Module.__init__(twin)
    # All attributes but those that nn.Module gives to every module: parameters, hooks and the like.
    vars(twin).update({**vars(module), **vars(twin)})
    modules[module] = twin
    twin._buffers.update(module._buffers)
    for name, parameter in module._parameters.items():
        value = None
        if parameter is not None:
            average = averages.of(parameter, key)
            zeros = torch.zeros_like(parameter) if average is None else average.clone()
            value = nn.Parameter(zeros, requires_grad=False)
        twin._parameters[name] = value
    for name, child in module.named_children():
        twin._modules[name] = twin_of(child, averages, key, modules)
    return twin


def _nothing() -> None:
    """Stands for the removal of a seed from a network that it is not in."""


def _with_layers(seed: SourceSeed) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yields the layers of the seed's place, each with the layer of the seed that becomes a part of it."""
    layers = seed.place.layers
    children = list(seed.body.children())
    if len(layers) == 1:  # it takes up all of the seed
        layers *= len(children)
    return zip(layers, children, strict=False)
