"""A grown network without Esper: the user's own modules, and kept seeds made of torch's modules only.

Classes of Esper are traced by torch.fx into graph modules, which torch saves and loads without them.
"""

from __future__ import annotations

import copy
import inspect
import operator
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from esper.config import ConfigError
from esper.hosts.graft import GraftedHost
from esper.hosts.grown import GrownHost
from esper.hosts.grown_module import GrownModule, grown_in_place
from esper.hosts.host import kept_modes
from esper.hosts.inputs import as_inputs, call
from esper.hosts.merge import merge_seeds
from esper.hosts.outputs import logits_of
from esper.lifecycle.ramps import BlendOperator
from esper.ops import NormReluPool
from esper.seeds.blend import Seed

TOLERANCE = 1e-4
"""Max difference of outputs from those of the network, in units of its largest output; rounding differs."""


def plain(network: nn.Module, example: Any, merge: bool = False) -> nn.Module:
    """Returns a copy of a grown network that needs no Esper: torch's own modules, and yours.

    It is trained, saved (``torch.save``, safetensors of its ``state_dict``) and exported (``torch.export``,
    ``torch.onnx.export``) like any other module. ``torch.load`` needs your own classes, as always; a program that
    ``torch.export`` saved needs none.

    Args:
        network: what ``Grower.finish`` returns, or the network of ``esper.grow`` and ``esper.load_host``.
        example: a few inputs of the network: [B, ...], or a dict or tuple of arguments. They show how it calls the
            submodules that have grown, and the copy is compared with the network on them.
        merge: whether seeds that are linear in the output of a linear layer, such as ``lora`` on an ``nn.Linear``, are
            merged into its weights, which computes the same in eval mode. The others stay modules, and a warning says
            why.

    Raises:
        ConfigError: the network cannot run on ``example``, or cannot be made plain.
    """
    grown = _of_modules(copy.deepcopy(network))
    if isinstance(grown, GrownHost):
        if merge and grown.seeds:
            _warn_unmerged(dict.fromkeys(grown.seeds, f"its host is a {type(grown.host).__name__}, not a linear layer"))
        result: nn.Module = _traced(_HostWithSeeds(grown))
    else:
        if merge:
            _warn_unmerged(merge_seeds(grown))
        _replace_grown_modules(grown, example)
        result = grown
    _require_equal(network, result, example)
    return result


def _of_modules(network: nn.Module) -> nn.Module:
    """Returns a grafted network as its model with grown submodules; any other as it is."""
    if not isinstance(network, GrownHost):
        return network
    host = network.host
    if not isinstance(host, GraftedHost):
        return network
    seeds: dict[str, tuple[Seed, float]] = {}
    for name, seed in network.seeds.items():
        assert isinstance(seed, Seed)
        seeds[host.paths[name]] = (seed, network.kept[name].alpha)
    grown_in_place(host.model, seeds)
    return host.model


def _warn_unmerged(reasons: Mapping[str, str]) -> None:
    if reasons:
        listed = "; ".join(f"{place}: {reason}" for place, reason in reasons.items())
        warnings.warn(f"these seeds are not merged and stay modules: {listed}", stacklevel=3)


class _AddSeed(nn.Module):
    """h + alpha · d(h), as in ``Seed``, in operations without a branch on a tensor, which torch.fx can trace."""

    def __init__(self, seed: Seed, alpha: float) -> None:
        super().__init__()
        self.body, self.gate, self.operator, self.topology = seed.body, seed.gate, seed.operator, seed.topology
        self.alpha, self.dtype = alpha, next(seed.parameters()).dtype

    def forward(self, h: Tensor) -> Tensor:
        x = h.to(self.dtype)
        f = self.body(x)
        if self.operator is BlendOperator.MULTIPLY:
            f = x * torch.tanh(f)
        elif self.gate is not None:
            f = self._share(self.gate, x) * f
        return torch.add(h, f.type_as(h), alpha=self.alpha)

    def _share(self, gate: nn.Module, x: Tensor) -> Tensor:
        if self.topology == "cnn":
            return gate(x.mean(dim=(2, 3)))[:, :, None, None]  # type: ignore[no-any-return]
        if self.topology == "encoder":
            x = x.mean(dim=1, keepdim=True)
        elif self.topology != "mlp":
            x = x.cumsum(dim=1) / torch.ones_like(x[..., :1]).cumsum(dim=1)
        return gate(x)  # type: ignore[no-any-return]


class _HostWithSeeds(nn.Module):
    """A host of Esper's own with its seeds."""

    def __init__(self, network: GrownHost) -> None:
        super().__init__()
        self.host, self.seeds, self.training = network.host, nn.ModuleDict(), network.training
        for name, seed in network.seeds.items():
            assert isinstance(seed, Seed)
            self.seeds[name] = _AddSeed(seed, network.kept[name].alpha)

    def forward(self, x: Tensor) -> Tensor:
        names = [site.name for site in self.host.sites]

        def hook(site: int, h: Tensor) -> Tensor:
            return self.seeds[names[site]](h) if names[site] in self.seeds else h

        return self.host.forward_with_hook(x, hook)


class _Tracer(fx.Tracer):
    """Traces through the classes of Esper, and calls all others."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(type(each).__module__.startswith("esper.") for each in m.modules())


def _traced(module: nn.Module) -> fx.GraphModule:
    """Returns ``module`` without classes of Esper, with the same parameters."""
    for path, layer in list(module.named_modules()):
        if isinstance(layer, NormReluPool):
            module.set_submodule(path, _unfused(layer))
    try:
        graph = _Tracer().trace(module)
    except Exception as error:  # whatever a user's own host runs into
        raise ConfigError(f"a {type(module).__name__} cannot be traced: {type(error).__name__}: {error}") from error
    own = fx.Graph()  # without a reference to the tracer, which would be saved, too
    own.output(own.graph_copy(graph, {}))
    for node in own.nodes:
        node.type = None  # annotations that are strings, as in Esper's files, cannot be saved
    return fx.GraphModule(module, own, class_name="Grown")


def _unfused(layer: NormReluPool) -> nn.Sequential:
    norm = nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum)
    norm.load_state_dict(layer.state_dict())
    norm.to(layer.weight.device)
    return nn.Sequential(norm, nn.ReLU(), *([nn.MaxPool2d(2)] if layer.pool else [])).train(layer.training)


@dataclass
class _Call:
    """The form of a call of a grown submodule, and whether it returned a tuple."""

    positional: int
    keywords: tuple[str, ...]
    in_tuple: bool


def _replace_grown_modules(model: nn.Module, example: Any) -> None:
    grown = {path: module for path, module in model.named_modules() if isinstance(module, GrownModule)}
    calls: dict[str, _Call] = {}

    def note(path: str, arguments: tuple[Any, ...], keywords: dict[str, Any], output: object) -> None:
        calls[path] = _Call(len(arguments), tuple(keywords), isinstance(output, tuple))

    handles = [
        module.register_forward_hook(
            lambda _module, arguments, keywords, output, path=path: note(path, arguments, keywords, output),
            with_kwargs=True,
        )
        for path, module in grown.items()
    ]
    try:
        _output(model, example)
    finally:
        for handle in handles:
            handle.remove()
    for path, module in sorted(grown.items(), reverse=True):  # inner ones first
        if path not in calls:
            raise ConfigError(f"the example does not reach {path}, which has grown: pass other inputs")
        model.set_submodule(path, _wrapped(path, module, calls[path]))


def _wrapped(path: str, grown: GrownModule, seen: _Call) -> fx.GraphModule:
    """Returns a module that takes the named arguments of the submodule and adds its seed."""
    seed = grown.get_submodule("seed")
    assert isinstance(seed, Seed)
    graph = fx.Graph()
    arguments, keywords = _placeholders(path, graph, grown.module, seen)
    output = graph.call_module("module", arguments, keywords)
    if seen.in_tuple:
        first, rest = (graph.call_function(operator.getitem, (output, part)) for part in (0, slice(1, None)))
        graph.output(graph.call_function(operator.add, ((graph.call_module("seed", (first,)),), rest)))
    else:
        graph.output(graph.call_module("seed", (output,)))
    parts = {"module": grown.module, "seed": _traced(_AddSeed(seed, grown.alpha).train(seed.training))}
    wrapped = fx.GraphModule(parts, graph, class_name="Grown")
    wrapped.training = grown.training  # and not that of a part of the submodule that is frozen
    return wrapped


def _placeholders(
    path: str, graph: fx.Graph, module: nn.Module, seen: _Call
) -> tuple[tuple[fx.Node, ...], dict[str, Any]]:
    """Adds the arguments of ``module``, and the keywords that were seen; returns its positional and named ones."""
    named = inspect.signature(module.forward).parameters.values()
    usual = [p for p in named if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if seen.positional > len(usual):
        raise ConfigError(
            f"{path} has grown, and {type(module).__name__}.forward takes *arguments, which torch.fx cannot pass on; "
            "torch.export saves the network as it is"
        )
    only = [p.name for p in named if p.kind is p.KEYWORD_ONLY and p.name in seen.keywords]
    extra = [name for name in seen.keywords if name not in {p.name for p in named}]
    arguments = tuple(graph.placeholder(p.name, default_value=_default(p.default)) for p in usual)
    return arguments, {name: graph.placeholder(name, default_value=None) for name in (*only, *extra)}


def _default(value: Any) -> Any:
    simple = value is None or isinstance(value, bool | int | float | str)
    return value if simple else inspect.Signature.empty


def _output(network: nn.Module, example: Any) -> Tensor:
    """Returns the logits of ``example`` in eval mode; every module's mode is as before afterwards."""
    try:
        with kept_modes(network), torch.no_grad():
            output = logits_of(call(network.eval(), as_inputs(example).clone()))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"the network cannot run on the example: {type(error).__name__}: {error}") from error
    if not isinstance(output, Tensor):
        raise ConfigError(f"the network returns {type(output).__name__} for the example, not a tensor or logits")
    return output


def _require_equal(network: nn.Module, result: nn.Module, example: Any) -> None:
    wanted, found = _output(network, example), _output(result, example)
    scale = max(1.0, float(wanted.abs().max()))
    if (difference := float((found - wanted).abs().max())) > TOLERANCE * scale:
        raise ConfigError(f"the plain copy differs from the network by {difference:g} on the example")
