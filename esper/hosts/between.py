"""One recorded forward pass of a model: its submodules, their layouts, and the layers between two of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from esper.config import ConfigError
from esper.core.blueprints.adapted import Adapted
from esper.core.blueprints.source import PER_CHANNEL, Applied, Extensible
from esper.core.place import Place
from esper.hosts.container import own_children
from esper.hosts.example import tensors_in
from esper.hosts.gated import gated_of
from esper.hosts.inputs import features_of, source_of
from esper.hosts.layout import CHANNELS, Layout, LayoutInference, causal_where_measured, layout_of, samples_measured
from esper.hosts.sources import SitePath

Part = Mapping[str, Any]
"""One layer, as JSON: ``{"path": ...}`` of a submodule, or ``{"function": ..., "options": {...}}`` of torch.

``"returned_by"`` are the paths of other submodules that return its output, such as that of a block around it."""


@dataclass(frozen=True)
class Between:
    """The layers from a source to a sink in order, or the reason why they are not known."""

    parts: tuple[Part, ...] = ()
    obstacle: str = ""

    @property
    def inner(self) -> set[str]:
        """Paths of the submodules that return units which lie between the source and the sink."""
        paths = {part["path"] for part in self.parts[:-1] if "path" in part}
        return paths.union(*(part.get("returned_by", ()) for part in self.parts[:-1]))


@dataclass
class ModuleRun:
    """A submodule in a pass. Of several runs, its tensors are those of the last one."""

    inputs: Tensor | None = None
    """The first tensor that it reads."""
    output: object = None
    """The features that it returns."""
    channels_first: bool | None = None
    """Whether their channels come before their positions; None: both are possible."""
    count: int = 0
    changes: bool = False
    """Whether its outputs differ in shape between its runs."""


@dataclass(frozen=True)
class Call:
    """A call of a layer, or of a function of torch outside of all layers. Tensors are numbered in the pass."""

    name: str
    path: str | None
    """The layer; None for a function."""
    part: Part | None
    """None for a function that is no layer between a source and a sink."""
    inputs: tuple[int, ...]
    output: int | None
    """None if it returns no single tensor."""
    returns: str
    """Name of the type that it returns."""


class Trace(TorchFunctionMode):
    """One pass of ``model``, which ``run`` makes.

    Args:
        model: the network.
        run: runs it once, and always in the same way.
        sites: sites at which features are kept, and layers are noted if one of them has a source; None: everywhere.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[], object],
        sites: Collection[SitePath] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.run = run
        self.runs: dict[str, ModuleRun] = {}
        """The submodules that have run, by path, in the order in which they end."""
        self.calls: list[Call] = []
        self._paths = {module: path for path, module in model.named_modules()}
        self._kept = set(self._paths.values()) if sites is None else {site.sink for site in sites}
        self._inference = LayoutInference()
        self._samples: dict[tuple[int, ...], int | None] = {}
        self._numbers = WeakIdKeyDictionary()
        self._returned_by: dict[int | None, list[str]] = {}  # paths of submodules around layers, by what they return
        self._count = 0
        self._inside = 0  # number of layers that run at the moment, one in the other
        self._layers: set[nn.Module] = set()
        whole = sites is None or any(site.source is not None for site in sites)
        with ExitStack() as hooks:
            for module, path in self._paths.items():
                if whole or path in self._kept or isinstance(module, CHANNELS):
                    hooks.callback(module.register_forward_pre_hook(self._enter).remove)
                    hooks.callback(module.register_forward_hook(self._leave, with_kwargs=True).remove)
            if whole:
                self._layers = set(filter(is_layer, self._paths))
                hooks.enter_context(self)
            self.results: Any = run()

    def layout(self, where: str, site: SitePath, batch: int | None) -> Layout:
        """Returns the layout of the features at a sink, for ``batch`` samples if that is known.

        Seeds with a source work on each sample and position alike, so that it need not be known which is which. Raises
        ConfigError for features that cannot hold seeds, or whose layout is ambiguous.
        """
        run = self.runs[site.sink]
        if site.source is not None:
            batch = None
        return layout_of(where, run.output, run.channels_first, batch)

    def width(self, sink: str, layout: Layout) -> int:
        """Returns the number of channels of the features at a sink."""
        h = self.runs[sink].output
        assert isinstance(h, Tensor)
        return layout.width_of(h)

    def layouts(
        self,
        sites: Mapping[str, SitePath],
        declared: str | None,
        batch: int | None,
    ) -> dict[str, Layout]:
        """Returns the layouts at the sinks by slot: that of the ``declared`` topology, or those that are found.

        Raises ConfigError for a sink that the pass has not run, and as :meth:`layout` does.
        """
        for name, site in sites.items():
            if site.sink not in self.runs:
                raise ConfigError(f"slot {name}: the pass never runs {site.sink}")
        if declared is not None:
            return dict.fromkeys(sites, Layout(declared))
        layouts = {}
        reading = {}
        for name, site in sites.items():
            layouts[name] = self.layout(f"slot {name}: {site.sink}", site, batch)
            if site.source is None:
                h = self.runs[site.sink].output
                layouts[name] = samples_measured(self.model, site.sink, layouts[name], h, self.run, self._samples)
                reading[name] = site.sink, layouts[name]
        return layouts | causal_where_measured(self.model, reading, self.run)

    def between(self, site: SitePath) -> Between:
        """Returns the layers of a site with a source: each reads the output of the one before, which nothing else
        reads."""
        order = [call.path for call in self.calls]
        for path in site.paths:
            if order.count(path) > 1:
                return Between(obstacle=f"{path} runs more than once in a forward pass")
            if is_parametrized(self.model.get_submodule(path)):
                return Between(obstacle=f"the weights of {path} are computed from others, as by weight_norm")
        if site.sink in order and site.source not in order[: order.index(site.sink) + 1]:
            return Between(obstacle=f"{site.sink} runs before {site.source}")
        parts: list[Part] = []
        chain: list[int] = []
        reached = False
        for call in self.calls:
            # What follows the sink may do with its output as it likes.
            read = [number for number in call.inputs if number in (chain[:-1] if reached else chain)]
            if call.path != site.source and not read:
                continue
            follows = call.part is not None and not reached and read == chain[-1:]
            if call.part is None or not (call.path == site.source or follows):
                return Between(obstacle=f"{call.name} reads what lies between {site.source} and {site.sink}")
            parts.append(call.part)
            if call.output in self._returned_by:
                parts[-1] = {**call.part, "returned_by": self._returned_by[call.output]}
            if call.output is None:
                return Between(obstacle=f"{call.name} returns {call.returns}, not one tensor")
            if call.output not in chain[-1:]:  # a layer may work in place, or do nothing
                chain.append(call.output)
            reached = call.path == site.sink
        if not reached:
            return Between(obstacle=f"{site.sink} does not compute its output from that of {site.source}")
        return Between(tuple(parts))

    def _enter(self, module: nn.Module, _inputs: object) -> None:
        self._inside += module in self._layers

    def _leave(
        self,
        module: nn.Module,
        inputs: tuple[Any, ...],
        named: dict[str, Any],
        output: object,
    ) -> None:
        path = self._paths[module]
        h = features_of(output)
        nested = isinstance(h, Tensor) and h.is_nested  # asking for its shape is an error
        if not nested:
            self._inference.note(module, h)
        run = self.runs.pop(path, ModuleRun())
        self.runs[path] = run  # behind those that ended before
        run.count += 1
        if path in self._kept and nested:
            run.output = h
        elif path in self._kept:
            run.changes |= run.count > 1 and getattr(run.output, "shape", None) != getattr(h, "shape", None)
            run.output = h
            run.channels_first = self._inference.channels_first(h)
            try:
                run.inputs = source_of(inputs, named)
            except TypeError:
                run.inputs = None
        if module in self._layers:
            self._inside -= 1
            if not self._inside:
                self._note(path, path, {"path": path}, (inputs, named), output)
        elif self._layers and not self._inside and isinstance(h, Tensor):
            self._returned_by.setdefault(self._number(h), []).append(path)

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
        if not self._inside and name not in SHAPES and list(tensors_in(output)):
            self._note(name, None, _part_of(name, args, kwargs, output), (args, kwargs), output)
        return output

    def _note(
        self,
        name: str,
        path: str | None,
        part: Part | None,
        inputs: object,
        output: object,
    ) -> None:
        read = tuple(map(self._number, tensors_in(inputs)))
        returned = self._number(output) if isinstance(output, Tensor) else None
        self.calls.append(Call(name, path, part, read, returned, type(output).__name__))

    def _number(self, tensor: Tensor) -> int:
        self._count += 1
        return int(self._numbers.setdefault(tensor, self._count))  # type: ignore[no-untyped-call]


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
POOLS = re.compile(r"(adaptive_)?(max|avg)_pool[123]d")
IN_PLACE = {"relu_": "relu", "tanh_": "tanh", "sigmoid_": "sigmoid"}
"""Functions that compute the same as others, in the memory of their input."""

SHAPES = {"size", "dim", "numel", "shape", "device", "dtype", "is_cuda", "requires_grad", "stride", "ndim", "__get__"}
"""Questions about a tensor, which compute nothing of it."""


def layers_of(model: nn.Module, between: Sequence[Part]) -> tuple[nn.Module, ...]:
    """Returns the layers of ``model`` that ``between`` describes."""
    layers: list[nn.Module] = []
    for part in between:
        if "path" in part:
            module = model.get_submodule(part["path"])
            layers.append(gated_of(module) or module)
        else:
            kind = {"flatten": nn.Flatten, "dropout": nn.Dropout}.get(part["function"])
            options = part["options"]
            layers.append(kind(**options) if kind else Applied(part["function"], options))
    return tuple(layers)


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
    if POOLS.fullmatch(name) and len(rest) <= len(_ORDER):
        order = _ORDER_OF.get(name[:8], _ORDER)
        named = {**dict(zip(order, rest, strict=False)), **kwargs}
        options = {key: value for key, value in named.items() if value is not None}
        return {"function": name, "options": options}
    return None


_ORDER = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
_ORDER_OF = {"adaptive": ("output_size",), "avg_pool": ("kernel_size", "stride", "padding", "ceil_mode")}
"""Names of the positional arguments of pools."""


def is_layer(module: nn.Module) -> bool:
    """Whether a module counts as one layer: it has no submodules, or says how it grows."""
    if isinstance(module, (*PER_CHANNEL, Adapted, Extensible)) or not own_children(module):
        return True
    return gated_of(module) is not None
