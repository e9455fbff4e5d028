"""Gated feed-forward modules, such as Llama's, which are widened as a whole: down(act(gate(x)) · up(x))."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from esper.hosts.seed_hook import own_children


class Gated(nn.Module):
    """A gated module as a layer that grows by units, see ``esper.seeds.blueprints.source.Extensible``.

    Some of its linear layers compute its units, and one reads them. How units are computed is left to the module's own
    forward method.
    """

    def __init__(self, module: nn.Module, units: int, writers: tuple[str, ...], reader: str) -> None:
        super().__init__()
        self.module, self.units = module, units
        self.writers, self.reader = writers, reader

    def forward(self, x: Tensor) -> Any:
        return self.module(x)

    def more(self, units: int) -> MoreGated:
        """Makes a module of the same class with ``units`` units."""
        linear = {name: self._like(name, units) for name in (*self.writers, self.reader)}
        return MoreGated(_twin(self.module, linear), self.reader)

    @torch.no_grad()
    def absorb(self, more: nn.Module, alpha: float) -> None:
        """Takes over the units of ``more``, which :meth:`more` made, and whose output counts ``alpha`` times."""
        new = more.get_submodule("body")
        for name in self.writers:
            mine, other = self._linear(name), new.get_submodule(name)
            for key, old in list(mine.named_parameters(recurse=False)):
                mine.register_parameter(key, _joined(old, other.get_parameter(key), 0, 1.0))
            mine.out_features += other.get_parameter("weight").shape[0]
        reader, other = self._linear(self.reader), new.get_submodule(self.reader)
        reader.register_parameter("weight", _joined(reader.weight, other.get_parameter("weight"), 1, alpha))
        self.units = reader.in_features = reader.weight.shape[1]

    @property
    def inputs(self) -> int:
        """Number of features that it reads."""
        return self._linear(self.writers[0]).in_features

    def _linear(self, name: str) -> nn.Linear:
        layer = self.module.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        return layer

    def _like(self, name: str, units: int) -> nn.Linear:
        layer = self._linear(name)
        inputs, outputs = (units, layer.out_features) if name == self.reader else (layer.in_features, units)
        return nn.Linear(inputs, outputs, bias=layer.bias is not None)


class MoreGated(nn.Module):
    """More units of a gated module, as a module of its class."""

    def __init__(self, body: nn.Module, reader: str) -> None:
        super().__init__()
        self.body, self.reader = body, reader

    @property
    def project(self) -> nn.Module:
        """The layer that reads the units."""
        return self.body.get_submodule(self.reader)

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


def gated_of(module: nn.Module) -> Gated | None:
    """Returns a module as a gated one; None if it is none.

    It has two or more linear layers from its input to its units, one from them to its output, and nothing else with
    weights. That its outputs are sums over units is tried on copies with a few random ones.
    """
    children = own_children(module)
    linear = {name: child for name, child in children.items() if type(child) is nn.Linear}
    weighted = any(next(child.parameters(), None) is not None for name, child in children.items() if name not in linear)
    if len(linear) < 3 or weighted or next(module.parameters(recurse=False), None) is not None:
        return None
    sizes = {name: (layer.in_features, layer.out_features) for name, layer in linear.items()}
    for reader, (units, _) in sizes.items():
        writers = tuple(name for name in sizes if name != reader)
        same = {sizes[name] for name in writers}
        if len(same) == 1 and sizes[writers[0]][1] == units:
            found = Gated(module, units, writers, reader)
            return found if _adds_up(found) else None
    return None


@torch.no_grad()
def _adds_up(gated: Gated) -> bool:
    """Whether a copy with 5 random units computes what copies with 2 and 3 of them do together."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        some, others = (gated.more(units).double().eval() for units in (2, 3))
        for part in (some, others):
            part.project.register_parameter("bias", None)
        x = torch.randn(2, 4, gated.inputs, dtype=torch.float64)
        try:
            apart = some(x), others(x)
            Gated(some.body, 2, gated.writers, gated.reader).absorb(others, 1.0)
            together = some(x)
        except Exception:  # a user's module may need anything
            return False
    if not all(isinstance(y, Tensor) and y.shape == apart[0].shape for y in (*apart, together)):
        return False
    return torch.allclose(apart[0] + apart[1], together) and bool(apart[1].any())


def _twin(module: nn.Module, linear: dict[str, nn.Linear]) -> nn.Module:
    """Returns a module of the same class, attributes and buffers, with ``linear`` in place of its layers.

    It shares no submodule with the module, whose mode is its own, and has no hooks.
    """
    twin: nn.Module = object.__new__(type(module))
    nn.Module.__init__(twin)
    fresh = vars(twin).copy()
    vars(twin).update({name: value for name, value in vars(module).items() if name not in fresh})
    twin.training = module.training
    twin._buffers.update(module._buffers)
    for name, child in own_children(module).items():
        twin.add_module(name, linear[name] if name in linear else _twin(child, {}))
    return twin


def _joined(old: Tensor, new: Tensor, dim: int, factor: float) -> nn.Parameter:
    values = torch.cat([old.double(), factor * new.to(old.device).double()], dim)
    return nn.Parameter(values.to(old.dtype), requires_grad=old.requires_grad)
