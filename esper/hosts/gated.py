"""Gated modules, such as the SwiGLU of a transformer, as layers that grow by units."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from esper.core.blueprints.source import Extensible
from esper.hosts.container import GROWING, own_children


class Gated(Extensible):
    """A gated module as a layer that grows by units.

    Some of its linear layers compute its units, and one reads them. How units are computed is left to the module's own
    forward method.
    """

    def __init__(
        self,
        module: nn.Module,
        writers: tuple[str, ...],
        reader: str,
    ) -> None:
        super().__init__()
        self.module = module
        self.writers = writers
        self.reader = reader

    def forward(self, x: Tensor) -> Any:
        return self.module(x)

    def more(self, units: int) -> MoreGated:
        """Makes a module of the same class with ``units`` units."""
        linear = {}
        for name in self.writers:
            layer = self._linear(name)
            linear[name] = nn.Linear(layer.in_features, units, bias=layer.bias is not None)
        reader = self.project
        linear[self.reader] = nn.Linear(units, reader.out_features, bias=reader.bias is not None)
        return MoreGated(_twin(self.module, linear), self.reader)

    @torch.no_grad()
    def absorb(self, more: nn.Module, alpha: float) -> None:
        """Takes over the units of ``more``, which :meth:`more` made, and whose output counts ``alpha`` times."""
        body = more.get_submodule("body")
        for name in self.writers:
            writer = self._linear(name)
            new = body.get_submodule(name)
            for key, old in list(writer.named_parameters(recurse=False)):
                writer.register_parameter(key, _joined(old, new.get_parameter(key), 0, 1.0))
            writer.out_features += len(new.get_parameter("weight"))
        reader = self.project
        new = body.get_submodule(self.reader)
        reader.register_parameter("weight", _joined(reader.weight, new.get_parameter("weight"), 1, alpha))
        reader.in_features = reader.weight.shape[1]

    @property
    def units(self) -> int:
        return self.project.in_features

    @property
    def project(self) -> nn.Linear:
        """The layer that reads the units."""
        return self._linear(self.reader)

    @property
    def inputs(self) -> int:
        """Number of features that it reads."""
        return self._linear(self.writers[0]).in_features

    def _linear(self, name: str) -> nn.Linear:
        layer = self.module.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        return layer


class MoreGated(nn.Module):
    """More units of a gated module, as a module of its class."""

    def __init__(self, body: nn.Module, reader: str) -> None:
        super().__init__()
        self.body = body
        self.reader = reader

    @property
    def project(self) -> nn.Module:
        """The layer that reads the units."""
        return self.body.get_submodule(self.reader)

    def forward(self, x: Tensor) -> Any:
        return self.body(x)


def gated_of(module: nn.Module) -> Gated | None:
    """Returns ``module`` as a gated module; None if it is not gated.

    A gated module has two or more linear layers from its input to its units, one from them to its output, and nothing
    else with weights. That its outputs are sums over units is tried on copies with a few random ones.
    """
    linear: dict[str, nn.Linear] = {}
    for name, child in own_children(module).items():
        if type(child) is nn.Linear:
            linear[name] = child
        elif next(child.parameters(), None) is not None:
            return None
    if len(linear) < 3 or next(module.parameters(recurse=False), None) is not None:
        return None
    for reader, layer in linear.items():
        units = layer.in_features
        writers = tuple(name for name in linear if name != reader)
        inputs = {linear[name].in_features for name in writers}
        outputs = {linear[name].out_features for name in writers}
        if len(inputs) == 1 and outputs == {units}:
            gated = Gated(module, writers, reader)
            return gated if _adds_up(gated) else None
    return None


@torch.no_grad()
def _adds_up(gated: Gated) -> bool:
    """Whether a copy with 5 random units computes what copies with 2 and 3 of them do together."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        some = gated.more(2).double().eval()
        others = gated.more(3).double().eval()
        for part in (some, others):
            part.project.register_parameter("bias", None)
        x = torch.randn(2, 4, gated.inputs, dtype=torch.float64)
        try:
            of_some = some(x)
            of_others = others(x)
            Gated(some.body, gated.writers, gated.reader).absorb(others, 1.0)
            of_all = some(x)
        except Exception:  # a user's module may need anything
            return False
    for y in (of_some, of_others, of_all):
        if not isinstance(y, Tensor) or y.shape != of_some.shape:
            return False
    return torch.allclose(of_some + of_others, of_all) and bool(of_others.any())


def _twin(module: nn.Module, linear: dict[str, nn.Linear]) -> nn.Module:
    """Returns a module of the same class, attributes and buffers, with ``linear`` in place of its layers.

    It shares no submodule with the module, whose mode is its own, and has no hooks.
    """
    twin: nn.Module = object.__new__(type(module))
    nn.Module.__init__(twin)
    # All attributes but those that nn.Module gives to every module: parameters, hooks and the like.
    vars(twin).update({**vars(module), **vars(twin)})
    vars(twin).pop(GROWING, None)
    twin.training = module.training
    twin._buffers.update(module._buffers)
    for name, child in own_children(module).items():
        if name in linear:
            twin.add_module(name, linear[name])
        else:
            twin.add_module(name, _twin(child, {}))
    return twin


def _joined(old: Tensor, new: Tensor, dim: int, factor: float) -> nn.Parameter:
    values = torch.cat([old.double(), factor * new.to(old.device).double()], dim)
    return nn.Parameter(values.to(old.dtype), requires_grad=old.requires_grad)
