"""The layers between the source and the sink of a site, found by watching a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from esper.core.blueprints.source import PER_CHANNEL, Applied, Extensible
from esper.core.place import Place
from esper.hosts.example import tensors_in
from esper.hosts.gated import gated_of
from esper.hosts.layout import Layout
from esper.hosts.seed_hook import own_children
from esper.hosts.sources import SitePath

Part = Mapping[str, Any]
"""One layer, as JSON: ``{"path": ...}`` of a submodule, or ``{"function": ..., "options": {...}}`` of torch."""


@dataclass(frozen=True)
class Between:
    """The layers from a source to a sink in order, or the reason why they are not known."""

    parts: tuple[Part, ...] = ()
    obstacle: str = ""


ELEMENTWISE = {
    "relu",
    "relu6",
    "gelu",
    "silu",
    "mish",
    "elu",
    "selu",
    "celu",
    "leaky_relu",
    "hardswish",
    "hardsigmoid",
    "hardtanh",
    "softplus",
    "softsign",
    "tanh",
    "sigmoid",
}
POOLS = {
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
}
IN_PLACE = {"relu_": "relu", "tanh_": "tanh", "sigmoid_": "sigmoid"}
"""Functions that compute the same as others, in the memory of their input."""

SHAPES = {"size", "dim", "numel", "shape", "device", "dtype", "is_cuda", "requires_grad", "stride", "ndim", "__get__"}
"""Questions about a tensor, which compute nothing of it."""


@dataclass
class _Watch:
    """The layers of one site that a pass has shown so far."""

    site: SitePath
    parts: list[Part] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    """Outputs of the layers so far, the present one last."""
    obstacle: str = ""
    seen: set[str] = field(default_factory=set)
    """Layers that have run."""
    reached: bool = False
    """Whether the sink has been reached."""

    def run(self, path: str, inputs: object, output: object) -> None:
        """Notes a call of the layer ``path``."""
        if path in self.site.paths and path in self.seen:
            self.obstacle = f"{path} runs more than once in a forward pass"
        elif path == self.site.sink and self.site.source not in (path, *self.seen):
            self.obstacle = f"{path} runs before {self.site.source}"
        elif path == self.site.source:
            self.go_on({"path": path}, output)
        else:
            self.use(inputs, output, {"path": path}, path)
        self.seen.add(path)

    def use(
        self,
        values: object,
        output: object,
        part: Part | None,
        name: str,
    ) -> None:
        """Notes a call of ``name`` with ``values``, which is the layer ``part`` if it can be one."""
        before = self.tensors
        if self.reached:
            before = before[:-1]  # what follows the sink may do as it likes
        used = []
        for value in tensors_in(values):
            used += [tensor for tensor in before if tensor is value]
        if self.obstacle or not used:
            return
        if part is None or self.reached or len(used) > 1 or used[0] is not self.tensors[-1]:
            self.obstacle = f"{name} reads what lies between {self.site.source} and {self.site.sink}"
        else:
            self.go_on(part, output)

    def go_on(self, part: Part, output: object) -> None:
        self.parts.append(part)
        if not isinstance(output, Tensor):
            self.obstacle = f"{describe(part)} returns {type(output).__name__}, not one tensor"
        elif not self.tensors or output is not self.tensors[-1]:  # a layer may work in place, or do nothing
            self.tensors.append(output)
        self.reached = part.get("path") == self.site.sink


def find_between(
    model: nn.Module,
    sites: Mapping[str, SitePath],
    run: Callable[[], object],
) -> dict[str, Between]:
    """Returns by slot the layers between source and sink of those ``sites`` that have a source.

    ``run`` runs the model once. Layers are found if each reads the output of the one before it, which nothing else
    reads.
    """
    watches = {}
    for name, site in sites.items():
        if site.source is not None:
            watches[name] = _Watch(site)
    if not watches:
        run()
        return {}
    with _watching(model, list(watches.values())):
        run()
    return {name: _result(watch) for name, watch in watches.items()}


def _result(watch: _Watch) -> Between:
    if watch.obstacle:
        return Between(obstacle=watch.obstacle)
    if not watch.reached:
        return Between(obstacle=f"{watch.site.sink} does not compute its output from that of {watch.site.source}")
    return Between(tuple(watch.parts))


def describe(part: Part) -> str:
    return str(part.get("path") or part.get("function"))


def layers_of(model: nn.Module, between: Sequence[Part]) -> tuple[nn.Module, ...]:
    """Returns the layers of ``model`` that ``between`` describes."""
    layers: list[nn.Module] = []
    for part in between:
        if "path" in part:
            module = model.get_submodule(part["path"])
            layers.append(gated_of(module) or module)
        else:
            layers.append(_applied(part["function"], part["options"]))
    return tuple(layers)


def _applied(function: str, options: Mapping[str, Any]) -> nn.Module:
    if function == "flatten":
        return nn.Flatten()
    if function == "dropout":
        return nn.Dropout(**options)
    return Applied(function, options)


def place_of(
    model: nn.Module,
    name: str,
    channels: int,
    layout: Layout,
    between: Between | None,
) -> Place:
    """Returns the place of a slot of ``model``, with what lies ``between`` its source and sink if it has a source."""
    place = Place(name, channels, topology=layout.topology, order=layout.order)
    if between is None:
        return place
    layers = layers_of(model, between.parts)
    return replace(place, has_source=True, layers=layers, obstacle=between.obstacle)


class _Functions(TorchFunctionMode):
    """Sees the functions of torch that a forward method calls outside of the layers that are known as such."""

    def __init__(self, watches: Sequence[_Watch]) -> None:
        super().__init__()
        self.watches = watches
        self.inside = 0
        """Number of known layers that run at the moment, one in the other."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if not self.inside and name not in SHAPES and list(tensors_in(output)):
            part = _part_of(name, args, kwargs, output)
            for watch in self.watches:
                watch.use((args, kwargs), output, part, name)
        return output


def _part_of(
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: Any,
) -> Part | None:
    """Returns a function that treats each channel by itself as a part; None for another."""
    name = IN_PLACE.get(name, name)
    h, *rest = args
    if not isinstance(h, Tensor) or not isinstance(output, Tensor):
        return None
    if name in ("flatten", "view", "reshape") and h.dim() > 1 and output.shape == h.flatten(1).shape:
        return {"function": "flatten", "options": {}}
    if name == "dropout":
        share = kwargs.get("p", 0.5)
        if rest:
            share = rest[0]
        return {"function": "dropout", "options": {"p": float(share)}}
    if name in ELEMENTWISE and not rest:
        options = {key: value for key, value in kwargs.items() if key != "inplace"}
        return {"function": name, "options": options}
    if name in POOLS and len(rest) <= len(_ORDER):
        order = _ORDER_OF.get(name[:8], _ORDER)
        named = {**dict(zip(order, rest, strict=False)), **kwargs}
        options = {key: value for key, value in named.items() if value is not None}
        return {"function": name, "options": options}
    return None


_ORDER = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
_ORDER_OF = {"adaptive": ("output_size",), "avg_pool": ("kernel_size", "stride", "padding", "ceil_mode")}
"""Names of the positional arguments of pools."""


@contextmanager
def _watching(model: nn.Module, watches: Sequence[_Watch]) -> Iterator[None]:
    functions = _Functions(watches)
    paths = {module: path for path, module in model.named_modules()}
    layers = {module for module in paths if is_layer(module)}

    def enter(module: nn.Module, _inputs: Any) -> None:
        functions.inside += module in layers

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        if module not in layers:
            return
        functions.inside -= 1
        if functions.inside:
            return
        path = paths[module]
        for watch in watches:
            watch.run(path, inputs, output)

    with ExitStack() as hooks:
        for module in paths:
            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        hooks.enter_context(functions)
        yield


def is_layer(module: nn.Module) -> bool:
    """Whether a module counts as one layer: it has no submodules, or says how it grows."""
    if isinstance(module, (*PER_CHANNEL, Extensible)) or not own_children(module):
        return True
    return gated_of(module) is not None
