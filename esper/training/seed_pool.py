"""Reuses the memory of removed seeds for later ones of the same kind.

Memory does not grow with the number of seeds, and work captured with one seed can be replayed with the next.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import chain
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from esper.core.blend import Seed
from esper.core.site import Site
from esper.ops.optimizer import SGD, AdamW
from esper.training.shadow import ShadowBuffers


@dataclass
class ParameterGroup:
    """Parameters with one owner: the host, or one seed."""

    name: str
    parameters: list[nn.Parameter]
    optimizer: SGD | AdamW
    site: Site | None
    with_host: bool = False
    """Whether its gradients are clipped together with the host's."""

    @property
    def gradients(self) -> list[Tensor | None]:
        """Gradients of the parameters, None for a parameter without a gradient."""
        return [parameter.grad for parameter in self.parameters]

    def take_state(
        self,
        pairs: Iterable[tuple[nn.Parameter, nn.Parameter]],
        optimizer: SGD | AdamW,
    ) -> None:
        """Gives parameters the state that ``optimizer`` has of others, by pairs (mine, other).

        State that there is already keeps its memory.
        """
        for mine, other in pairs:
            state = self.optimizer.state[mine]
            for name, value in optimizer.state.get(other, {}).items():
                if isinstance(state.get(name), Tensor):
                    state[name].copy_(value)
                elif value is not None:
                    state[name] = value.clone()

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


class SeedPool:
    """One host's seeds of the last ``max_kinds`` kinds with their optimizers, and shadow buffers for each site."""

    def __init__(self, max_kinds: int = 32) -> None:
        self.max_kinds = max_kinds
        self._seeds: OrderedDict[Hashable, Seed] = OrderedDict()
        self.groups: WeakKeyDictionary[Seed, ParameterGroup] = WeakKeyDictionary()
        self.shadows: dict[str, ShadowBuffers] = {}

    def reuse(self, seed: Seed, kind: Hashable) -> Seed:
        """Copies the new seed's values into a pooled seed of the same ``kind`` and returns that one.

        The pooled seed keeps its optimizer. Returns ``seed`` itself if it is the first of its kind, or if the layouts
        differ.
        """
        pooled = self._seeds.pop(kind, None)
        if pooled is None or _layout(pooled) != _layout(seed):
            pooled = seed
        # The kind that was used last is at the end, and the first one goes.
        self._seeds[kind] = pooled
        if len(self._seeds) > self.max_kinds:
            self._seeds.popitem(last=False)
        if pooled is seed:
            return seed

        pooled.leading = seed.leading
        with torch.no_grad():
            for old, new in zip(_tensors(pooled), _tensors(seed), strict=True):
                old.copy_(new)
        for parameter, fresh in zip(pooled.parameters(), seed.parameters(), strict=True):
            parameter.requires_grad_(fresh.requires_grad)
            parameter.grad = None
        return pooled


def _tensors(seed: Seed) -> list[Tensor]:
    return list(chain(seed.parameters(), seed.buffers()))


def _layout(seed: Seed) -> list[object]:
    """All that must be equal for one seed to replace another: its modules, and its tensors' layouts."""
    layout: list[object] = [repr(seed)]
    for name, tensor in chain(seed.named_parameters(), seed.named_buffers()):
        layout.append((name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
    return layout
