"""A grown network without Esper: the user's own modules, and kept seeds made of torch's modules only.

Classes of Esper are traced by torch.fx into graph modules, which torch saves and loads without them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from esper.config import ConfigError
from esper.core.blend import Seed
from esper.core.blueprints.adapted import merge_adapters
from esper.core.place import SPATIAL, Features
from esper.hosts.container import CONTAINER, containers_in, forget_copied
from esper.hosts.example import as_it_is, coarsest_dtype, difference, outputs_of
from esper.hosts.graft import GraftedHost
from esper.hosts.grown import GrownHost
from esper.hosts.host import Host, SegmentedHost
from esper.hosts.inputs import logits_of
from esper.hosts.merge import merge_all, warn_unmerged
from esper.hosts.seed_hook import (
    attach,
    hooks_of,
    key_of,
    path_of,
    unregister,
)
from esper.hosts.seed_state import note_seeds
from esper.hosts.sources import SitePath
from esper.hosts.widen import merge_sources, seeds_of_host
from esper.ops.norm_relu_pool import NormReluPool


def plain(network: nn.Module, example: Any, merge: bool = False) -> nn.Module:
    """Returns a copy of a grown network that needs no Esper: torch's own modules, and yours.

    It is trained, saved (``torch.save``, safetensors of its ``state_dict``) and exported (``torch.export``,
    ``torch.onnx.export``) like any other module. ``torch.load`` needs your own classes, as always; a program that
    ``torch.export`` saved needs none. Its submodules keep their classes, and its state-dict has the keys of the
    network's; seeds are forward hooks that torch can save.

    Args:
        network: what ``Grower.finish`` returns, or the network of ``esper.grow`` and ``esper.load_host``; a part of
            it; or a module around several. It stays as it is.
        example: a few inputs of the network: one argument, a tuple of its arguments, or a dict of them by name, of any
            kind. A named tuple is one argument. The copy is compared with the network on them.
        merge: whether seeds that are linear in the output of a linear layer, such as ``lora`` on an ``nn.Linear``, are
            merged into its weights, which computes the same in eval mode. Widenings become units of the layers that
            they widen, and LoRAs of a layer's weights a part of them, as the adapters of frozen layers always do. The
            others stay modules, and a warning says why.

    Raises:
        ConfigError: the network cannot run on ``example``, or cannot be made plain, as when its copy would use its own
            parameters.
    """
    read = as_it_is
    if isinstance(network, Host):
        read = logits_of  # a grafted host returns the logits of its model
    wanted = outputs_of(network, example, read)
    rounding = coarsest_dtype(network)
    result = _copy_of(network)

    def changed() -> str | None:
        return difference(wanted, outputs_of(result, example, read), rounding)

    _require_independent(network, changed)
    merge_adapters(result)
    result, reasons = _without_hosts(result, changed if merge else None)
    forget_copied(result)
    if merge:
        reasons.update(merge_all(result, changed))
    _require_no_sources(result, reasons)
    warn_unmerged(reasons)
    note_seeds(result)
    _replace_hooks(result, example)
    problem = changed()
    if problem:
        raise ConfigError(f"the plain copy computes something else than the network on the example: {problem}")
    return result


def _copy_of(network: nn.Module) -> nn.Module:
    """Returns a deep copy, also of modules that keep tensors of a past pass, which deepcopy refuses."""
    memo: dict[int, Any] = {}
    for module in network.modules():
        for value in vars(module).values():
            members = value if isinstance(value, list | tuple) else [value]
            for member in members:
                if isinstance(member, Tensor) and not member.is_leaf:
                    memo[id(member)] = member.detach().clone()
    try:
        return copy.deepcopy(network, memo)
    except Exception as error:
        raise ConfigError(f"the network cannot be copied: {type(error).__name__}: {error}") from error


def _without_hosts(network: nn.Module, changed: Callable[[], str | None] | None) -> tuple[nn.Module, dict[str, str]]:
    """Returns the network with ordinary modules in the place of Esper's hosts.

    ``changed`` says how the network's outputs have changed; None: seeds are not merged. Also returns the reason for
    each of their seeds that cannot be merged, by path.
    """
    reasons: dict[str, str] = {}
    if isinstance(network, Host):
        return _ordinary(network, "", reasons, changed), reasons
    hosts = {path: module for path, module in network.named_modules() if isinstance(module, Host)}
    for path, host in hosts.items():
        is_part_of_host = any(path.startswith(f"{outer}.") for outer in hosts)
        if not is_part_of_host:
            network.set_submodule(path, _ordinary(host, f"{path}.", reasons, changed))
    return network, reasons


def _ordinary(
    host: Host,
    prefix: str,
    reasons: dict[str, str],
    changed: Callable[[], str | None] | None,
) -> nn.Module:
    """Returns a grafted host as its model with seeds in it, and any other as a graph."""
    grown = host
    if not isinstance(grown, GrownHost):
        grown = GrownHost(host, {}, {}, "")
        grown.train(host.training)
    inner = grown.host
    if not isinstance(inner, GraftedHost):
        if changed is not None:
            unmerged = merge_sources(grown, seeds_of_host(grown), changed)
            residual = f"its host is a {type(inner).__name__}, not a linear layer"
            for name in grown.seeds:
                reasons[prefix + name] = unmerged.get(name, residual)
        return _traced(_HostWithSeeds(grown))
    seeds: dict[str, tuple[str, Seed, float]] = {}
    recipes = {}
    for name, seed in grown.seeds.items():
        assert isinstance(seed, Seed)
        kept = grown.kept[name]
        path = str(SitePath.parse(inner.paths[name]))
        seeds[path] = name, seed, kept.alpha
        recipes[path] = {"blueprint": kept.blueprint, "between": list(inner.between.get(name, ()))}
    attach(inner.model, seeds, recipes)
    return inner.model


def _require_no_sources(network: nn.Module, reasons: Mapping[str, str]) -> None:
    """Raises ConfigError for a seed that reads a source and would stay a module of its own."""
    for _, _, hook in hooks_of(network):
        if hook.seed is None or hook.frame is None:
            continue
        path = str(path_of(network, hook))
        why = reasons.get(path, "pass merge=True, which makes it a part of its layers")
        raise ConfigError(
            f"slot {hook.name}: a seed that reads a source ({path}) cannot stay a module of its own in an ordinary "
            f"network: {why}"
        )


class _AddSeed(Seed):
    """h + alpha · d(s) of a source s, with the modules of a seed, in operations that torch.fx can trace: none of them
    branches on a tensor."""

    field: str | None = None
    """Of a hook on a submodule that returns its features first in a named tuple, their name; "" for another tuple, None
    for a submodule that returns them alone."""

    def __init__(self, seed: Seed, alpha: float) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(seed))
        self.alpha = alpha

    def forward(self, module: nn.Module, inputs: Any, output: Any) -> Any:  # type: ignore[override]
        """Is called as a forward hook."""
        if self.field is None:
            return self.added(output, output)
        h = self.added(output[0], output[0])
        if self.field:
            return output._replace(**{self.field: h})
        return (h,) + output[1:]  # noqa: RUF005  torch.fx cannot unpack

    def added(self, h: Tensor, source: Tensor) -> Tensor:
        weight = next(self.parameters(), None)
        x = source
        if weight is not None:
            x = source.type_as(weight)  # not a fixed dtype: the copy may be turned into another one
        if self.order:
            x = x.permute(self.order)
        f = self._of_leading(x)
        if self.order:
            f = f.permute(self.back)
        return torch.add(h, f.type_as(h), alpha=self.alpha)

    def _in_order(self, h: Tensor) -> Tensor:
        return self._delta(h)

    def _delta(self, h: Tensor) -> Tensor:
        if self.gate is None or self.topology in (*SPATIAL, "encoder"):
            return super()._delta(h)
        mean = h
        if self.topology != "mlp":
            # The mean over the positions up to each one: their sum over their count.
            count = torch.ones_like(h[..., :1]).cumsum(dim=1)
            mean = h.cumsum(dim=1) / count
        return self.gate(mean) * self.body(h)  # type: ignore[no-any-return]


class _HostWithSeeds(nn.Module):
    """A host of Esper's own with its seeds."""

    def __init__(self, network: GrownHost) -> None:
        super().__init__()
        self.host = network.host
        self.seeds = nn.ModuleDict()
        self.training = network.training
        for name, seed in network.seeds.items():
            assert isinstance(seed, Seed)
            self.seeds[name] = _AddSeed(seed, network.kept[name].alpha)

    def forward(self, x: Tensor) -> Tensor:
        def hook(site: int, at: Features) -> Tensor:
            name = self.host.sites[site].name
            if name not in self.seeds:
                return at.h
            seed: Any = self.seeds[name]
            return seed.added(at.h, at.source)  # type: ignore[no-any-return]

        return self.host.forward_with_hook(x, hook)


class _Tracer(fx.Tracer):
    """Traces through the classes of Esper, and calls all others."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(type(module).__module__.startswith("esper.") for module in m.modules())

    def call_module(
        self,
        m: nn.Module,
        forward: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Calls a module, or traces through one that only groups others and is itself nowhere registered."""
        if any(m is known for known in self.root.modules()):
            return super().call_module(m, forward, args, kwargs)
        return forward(*args, **kwargs)


def _traced(module: nn.Module) -> fx.GraphModule:
    """Returns ``module`` without classes of Esper, with the same parameters."""
    for path, layer in list(module.named_modules()):
        if isinstance(layer, NormReluPool):
            module.set_submodule(path, layer.unfused())
    for host in module.modules():
        if isinstance(host, SegmentedHost):
            host.follow_layers()
    try:
        traced = _Tracer().trace(module)
    except Exception as error:  # whatever a user's own host runs into
        raise ConfigError(f"a {type(module).__name__} cannot be traced: {type(error).__name__}: {error}") from error
    graph = fx.Graph()  # without a reference to the tracer, which would be saved, too
    graph.output(graph.graph_copy(traced, {}))
    for node in graph.nodes:
        node.type = None  # annotations that are strings, as in Esper's files, cannot be saved
    return fx.GraphModule(module, graph, class_name="Grown")


def _plain_hook(seed: Seed, alpha: float, output: object) -> fx.GraphModule:
    """Returns a hook without classes of Esper; ``output`` is an example of what its submodule returns."""
    hook = _AddSeed(seed, alpha)
    if isinstance(output, tuple):
        hook.field = getattr(output, "_fields", ("",))[0]
    return _traced(hook)


def _replace_hooks(network: nn.Module, example: Any) -> None:
    """Puts graph modules in the place of Esper's hooks and of the container of their seeds."""
    returned = _returned(network, example)
    plain_hooks: dict[Seed, nn.Module] = {}  # by seed: two containers may have seeds of one name
    for path, module, hook in list(hooks_of(network)):
        if hook.seed is None:
            unregister(network, hook)
            continue
        if path not in returned:
            raise ConfigError(f"the example does not reach {path}, which has grown: pass other inputs")
        plain_hook = _plain_hook(hook.seed, hook.alpha, returned[path])
        plain_hooks[hook.seed] = plain_hook
        module._forward_hooks[key_of(hook.name)] = plain_hook  # type: ignore[index]
    for home, container in list(containers_in(network)):
        present = nn.ModuleDict()
        for name, seed in container.named_children():
            if seed in plain_hooks:
                present[name] = plain_hooks[seed]
        home._modules[CONTAINER] = present.train(container.training)
        if not present:
            del home._modules[CONTAINER]
    _drop_other_hooks(network)


def _returned(network: nn.Module, example: Any) -> dict[str, Any]:
    """Returns what each submodule with a seed returns for the example, by path."""
    returned: dict[str, Any] = {}
    grown = {path: module for path, module, hook in hooks_of(network) if hook.seed is not None}

    def note(path: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        returned[path] = output

    with ExitStack() as hooks:
        for path, module in grown.items():
            hooks.callback(module.register_forward_hook(partial(note, path)).remove)
        outputs_of(network, example)
        if grown.keys() - returned.keys():  # such as an auxiliary classifier, which runs in training only
            outputs_of(network, example, training=True)
    return returned


def _drop_other_hooks(network: nn.Module) -> None:
    """Removes hooks that guard GroupNorms of seeds, and those that a copy of a growing model has from its Grower.

    What torch notes of a hook goes, too: in another process, a new hook could get its number.
    """
    for module in network.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                named = hook if isinstance(hook, FunctionType) else type(hook)
                if named.__module__.startswith("esper."):
                    del hooks[key]
        _drop_notes(module._forward_pre_hooks_with_kwargs, module._forward_pre_hooks)
        _drop_notes(module._forward_hooks_with_kwargs, module._forward_hooks)
        _drop_notes(module._forward_hooks_always_called, module._forward_hooks)


def _drop_notes(notes: dict[int, bool], hooks: Mapping[int, Any]) -> None:
    for key in notes.keys() - hooks.keys():
        del notes[key]


def _require_independent(network: nn.Module, difference: Callable[[], str | None]) -> None:
    """Raises ConfigError if the copy, whose outputs ``difference`` compares, uses parameters of the network itself."""
    tensors = [tensor for tensor in (*network.parameters(), *network.buffers()) if tensor.is_floating_point()]
    numbers = [tensor.data for tensor in tensors]
    try:
        for tensor, data in zip(tensors, numbers, strict=True):
            tensor.data = data.new_full((), math.nan).expand_as(data)  # takes no memory
        try:
            problem = difference()
        except ConfigError as error:  # it ran before, with numbers
            problem = str(error)
    finally:
        for tensor, data in zip(tensors, numbers, strict=True):
            tensor.data = data
    if problem:
        raise ConfigError(
            "the network cannot be copied: the copy would go on using parameters of the network. It probably keeps a "
            "function, such as a lambda, that refers to its submodules, which copy.deepcopy does not copy; make it a "
            "method"
        )
