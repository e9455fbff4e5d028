"""Checks of the submodules that sites name: whether a hook can act there, and which dimension of their features is
which."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from esper.config import ConfigError
from esper.core.place import LAYOUTS, SEQUENCES, SPATIAL
from esper.hosts.container import require_stays
from esper.hosts.example import tensors_in
from esper.hosts.host import row_major
from esper.hosts.inputs import features_of, with_features
from esper.hosts.sources import SitePath

FOUND = "found"
"""Topology of a host whose sites have layouts of their own, which are found."""


@dataclass(frozen=True)
class Layout:
    """Which dimension of the features at a site is which."""

    topology: str
    order: tuple[int, ...] = ()
    """Dimensions in the order that seeds of the topology expect; (): they have that order."""

    def width_of(self, h: Tensor) -> int:
        """Returns the number of channels of features ``h``, which may have fewer dimensions if a seed has a source."""
        place = min(LAYOUTS[self.topology][1], h.dim() - 1)
        if self.order:
            place = self.order[place]
        return h.shape[place]

    @property
    def positions(self) -> int:
        """Index of the dimension of the positions of a sequence."""
        if self.order:
            return self.order[1]
        return 1


class LayoutInference:
    """The layers of a pass that show by their kind where features have their channels."""

    def __init__(self) -> None:
        self._latest: object = None
        """Output of the layer that ran last."""
        self._seen: list[tuple[bool, int, int]] = []
        """Of each layer that has run: whether layers of its kind have channels before the positions, the channels that
        it returns, and the rank of its output."""

    def note(self, layer: nn.Module, h: object) -> None:
        """Notes the features ``h`` that a layer has returned."""
        if not isinstance(layer, CHANNELS):
            return
        rank = CONVOLVED.get(type(layer))
        if rank is not None and isinstance(h, Tensor) and h.dim() == rank - 1:
            raise ConfigError(
                f"a {type(layer).__name__} returns shape {tuple(h.shape)}: the model runs on a sample without a batch "
                "dimension; pass batches, such as x[None]"
            )
        width = width_of(layer)
        if isinstance(h, Tensor) and h.dim() > 2 and width is not None:
            self._latest = h
            self._seen.append((isinstance(layer, CHANNELS_FIRST), width, h.dim()))

    def channels_first(self, h: object) -> bool | None:
        """Tells whether features ``h`` that were computed last have their channels before the positions.

        The latest layer whose output may have had this layout decides. None: two dimensions are equal, and layers have
        had either layout.
        """
        if not isinstance(h, Tensor) or h.dim() < 3:
            return False
        known = []
        for of_first, width, seen_rank in self._seen:
            before = _before(of_first, width, h)
            if seen_rank == h.dim() and before is not None:
                known.append(before)
        if len(set(known)) > 1 and h.shape[1] == h.shape[-1] and h is not self._latest:
            return None
        return known[-1] if known else h.dim() != 3


CONVOLVED = {
    nn.Conv1d: 3,
    nn.Conv2d: 4,
    nn.Conv3d: 5,
    nn.ConvTranspose1d: 3,
    nn.ConvTranspose2d: 4,
    nn.ConvTranspose3d: 5,
}
"""Dimensions of what a convolution returns for a batch."""


def layout_of(where: str, features: object, channels_first: bool | None, batch: int | None) -> Layout:
    """Returns the layout of ``features`` for ``batch`` samples if that is known.

    A sequence is taken for one of which each position sees all; ``sees_later`` measures it. Raises ConfigError if they
    can hold no seed, or may have either of two layouts, because two of their dimensions are equal.
    """
    h = require_features(where, features)
    rank = h.dim()
    if rank == 2:
        return Layout("mlp")
    spatial = {2 + dims: topology for topology, dims in SPATIAL.items()}
    if rank not in spatial:
        raise ConfigError(f"{where} returns shape {tuple(h.shape)}; seeds need 2 to 5 dimensions")
    if channels_first is None:
        raise ConfigError(
            f"{where} returns shape {tuple(h.shape)}: which dimension are the channels? Use an example of another "
            "size, or say topology="
        )
    if channels_first:
        return Layout(spatial[rank])
    if rank > 3:
        return Layout(spatial[rank], (0, rank - 1, *range(1, rank - 1)))
    samples, positions, _ = h.shape
    if batch is not None and samples == positions == batch > 1:
        raise ConfigError(
            f"{where} returns shape {tuple(h.shape)} for {batch} samples: which dimension are the samples? Use an "
            "example with another number of samples, or say topology="
        )
    if batch is not None and samples != batch and positions == batch:
        return Layout("encoder", (1, 0, 2))  # [T, B, D]
    return Layout("encoder")


def require_features(where: str, h: object) -> Tensor:
    """Returns features ``h`` as a tensor. Raises ConfigError for anything that a seed cannot add to."""
    if not isinstance(h, Tensor):
        raise ConfigError(f"{where} returns {type(h).__name__}; a site is one tensor, or the first of a tuple")
    if h.is_nested:
        raise ConfigError(f"{where} returns nested tensors; set enable_nested_tensor=False")
    if not h.is_floating_point() or not h.dim():
        raise ConfigError(f"{where} returns {h.dtype} of shape {tuple(h.shape)}; seeds need floating-point features")
    return h


def _before(first: bool, width: int, h: Tensor) -> bool | None:
    """Tells by a layer of ``width`` channels whether features ``h`` have their channels before the positions;
    None if it does not fit. Some layers of the other kind work on the second dimension, such as timm's LayerNorm2d."""
    if not first and width == h.shape[-1]:
        return False
    if width == h.shape[1]:
        return True
    return None


def causal_where_measured(
    model: nn.Module,
    found: Mapping[str, tuple[str, Layout]],
    run: Callable[[], object],
) -> dict[str, Layout]:
    """Returns the layouts of sites by slot, with the sequences in which no position sees a later one told apart.

    ``found`` has the path and the layout of each slot; ``run`` runs the model once, and always gives the same. Sites of
    one stack of layers are alike: where one of them sees later positions, all do.
    """
    looking = set()
    for path, layout in found.values():
        if layout.topology in SEQUENCES and sees_later(model, path, layout, run):
            looking.add(_stack(path))
    measured = {}
    for slot, (path, layout) in found.items():
        measured[slot] = layout
        if layout.topology not in SEQUENCES:
            continue
        topology = "transformer"
        if _stack(path) in looking:
            topology = "encoder"
        measured[slot] = Layout(topology, layout.order)
    return measured


def _stack(path: str) -> str:
    """Masks the numbers in a path, so that the paths of similar submodules are equal."""
    return re.sub(r"\d+", "#", path)


def sees_later(
    model: nn.Module,
    path: str,
    layout: Layout,
    run: Callable[[], object],
) -> bool:
    """Measures whether an earlier position depends on the last one of the features that ``path`` returns."""
    before = _earlier_positions(model, path, layout, run, 0.0)
    after = _earlier_positions(model, path, layout, run, 1.0)
    if len(before) != len(after):
        return True
    for old, new in zip(before, after, strict=True):
        scale = max(1.0, float(old.abs().max()))
        if not torch.allclose(old, new, rtol=1e-4, atol=1e-5 * scale, equal_nan=True):
            return True
    return False


def samples_measured(
    model: nn.Module,
    path: str,
    layout: Layout,
    h: object,
    run: Callable[[], object],
    known: dict[tuple[int, ...], int | None],
) -> Layout:
    """Returns the ``layout`` of features ``h`` at ``path`` with the samples where a measurement finds them, if it does.

    Sizes of inputs do not tell: the first input may be a mask, or a table that all samples share. ``known`` are
    earlier results: features of the same sizes are alike.
    """
    if layout.topology not in SEQUENCES or not isinstance(h, Tensor) or min(h.shape[:2]) < 2:
        return layout
    sizes = tuple(h.shape[:2])
    if known.get(sizes) is None:
        known[sizes] = samples_dimension(model, path, run)
    if known[sizes] is None:
        return layout
    return Layout(layout.topology, (1, 0, 2) if known[sizes] else ())


def samples_dimension(
    model: nn.Module,
    path: str,
    run: Callable[[], object],
) -> int | None:
    """Measures which of the first two dimensions of the features that ``path`` returns are the samples.

    Samples do not see one another: a change of one changes some of the model's outputs, and a change of another one
    none of the same. None: both dimensions are so, as where only layers of single positions follow, or neither is.
    """
    fitting = []
    for dimension in range(2):
        changes = [_changed_outputs(model, path, run, dimension, index) for index in (0, -1)]
        if any(not any(map(bool, map(torch.any, change))) for change in changes):
            continue
        shared = [bool((one & other).any()) for one, other in zip(*changes, strict=True)]
        if not any(shared):
            fitting.append(dimension)
    return fitting[0] if len(fitting) == 1 else None


@torch.no_grad()
def _changed_outputs(
    model: nn.Module,
    path: str,
    run: Callable[[], object],
    dimension: int,
    index: int,
) -> list[Tensor]:
    """Returns for each output of the model, which ``run`` returns, where it depends on the features of ``path`` at
    ``index`` of ``dimension``, bool. Single numbers, such as a loss of all samples, are left out."""

    def change(_module: nn.Module, _inputs: object, output: object) -> Any:
        h = features_of(output)
        assert isinstance(h, Tensor)
        changed = h.clone()
        ramp = torch.linspace(-3, 3, h.shape[-1], device=h.device)
        changed.select(dimension, index).add_(ramp.to(h.dtype))
        return with_features(output, changed)

    before = _outputs_of(run)
    handle = model.get_submodule(path).register_forward_hook(change)
    try:
        after = _outputs_of(run)
    finally:
        handle.remove()
    changes = []
    for old, new in zip(before, after, strict=False):
        if old.dim() and old.shape == new.shape:
            scale = max(1.0, float(old.abs().max())) if old.numel() else 1.0
            changes.append(~torch.isclose(old, new, rtol=1e-4, atol=1e-5 * scale, equal_nan=True))
    return changes


def _outputs_of(run: Callable[[], object]) -> list[Tensor]:
    """Returns the tensors that ``run`` returns; none if it returns nothing."""
    return [tensor.detach().double() for tensor in tensors_in(run()) if tensor.is_floating_point()]


@torch.no_grad()
def _earlier_positions(
    model: nn.Module,
    path: str,
    layout: Layout,
    run: Callable[[], object],
    shift: float,
) -> list[Tensor]:
    """Returns a number for each earlier position of all that is computed after the submodule ``path``, to the last
    position of whose output ``shift`` is added.

    It is a sum with weights: the values of a LayerNorm always have the same sum, and the same sum of squares.
    """
    sums: list[Tensor] = []
    sizes: list[tuple[int, int]] = []  # samples and positions of the output of the submodule
    positions = layout.positions
    samples = 1 - positions

    def change(_module: nn.Module, _inputs: object, output: object) -> Any:
        h = features_of(output)
        assert isinstance(h, Tensor)
        sizes.append((h.shape[samples], h.shape[positions]))
        if not shift:
            return None
        changed = h.clone()
        ramp = shift * torch.linspace(-3, 3, h.shape[2], device=h.device)
        changed.select(positions, -1).add_(ramp.to(h.dtype))
        return with_features(output, changed)

    def note(_module: nn.Module, _inputs: object, output: object) -> None:
        h = features_of(output)
        if not sizes or not isinstance(h, Tensor) or h.dim() < 3 or not h.is_floating_point():
            return
        if (h.shape[samples], h.shape[positions]) != sizes[0]:
            return
        earlier = h.narrow(positions, 0, h.shape[positions] - 1)
        values = earlier.movedim(positions, 0).flatten(1).double()
        weights = torch.arange(values.shape[1], device=h.device, dtype=torch.float64).cos()
        sums.append((values @ weights).cpu())

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.callback(module.register_forward_hook(note).remove)
        hooks.callback(model.get_submodule(path).register_forward_hook(change).remove)
        run()
    return sums


def check_sites(
    model: nn.Module,
    sites: Mapping[str, str],
    topology: str | None,
) -> tuple[str, ...]:
    """Returns the slots in row-major order. Raises ConfigError for what ``graft`` refuses without a forward pass."""
    if topology not in (None, *LAYOUTS):
        raise ConfigError(f"unknown topology {topology!r}; known: {', '.join(LAYOUTS)}")
    known = {path: module for path, module in model.named_modules(remove_duplicate=False) if path}
    paths = {name: SitePath.parse(text) for name, text in sites.items()}
    taken = set()
    for name, path in paths.items():
        for part in path.paths:
            if part not in known:
                raise ConfigError(f"slot {name}: the model has no submodule {part!r}; it has: {', '.join(known)}")
            check_module(model, name, part, topology)
        taken.add(tuple(known[part] for part in path.paths))
    if not sites or len(taken) < len(sites):
        raise ConfigError(f"sites must name one or more slots, each on its own submodule, not {dict(sites)}")
    try:
        return row_major(sites)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_features(
    name: str,
    path: SitePath,
    module: nn.Module,
    features: object,
    topology: str | None,
    batch: int | None = None,
) -> None:
    """Raises ConfigError if ``features`` that ``module`` returns for ``batch`` samples cannot hold the seeds of slot
    ``name``; None if the number of samples is not known.

    Seeds with a source may add to features of another layout, such as logits.
    """
    where = f"slot {name}: {path.sink}"
    h = require_features(where, features)
    if topology is None:
        return
    rank = LAYOUTS[topology][0]
    if h.dim() != rank and path.source is None:
        raise ConfigError(
            f"{where} returns {h.dtype} of shape {tuple(h.shape)}; {topology} seeds need floating-point features with "
            f"{rank} dimensions"
        )
    if batch is not None and h.shape[0] != batch:
        raise ConfigError(
            f"{where} returns shape {tuple(h.shape)} for {batch} samples; they must come first (batch_first=True in "
            "torch's transformers and recurrent layers)"
        )
    if topology == "cnn" and path.source is None:
        check_channels(where, module, h)


def check_module(
    model: nn.Module,
    name: str,
    path: str,
    topology: str | None,
) -> None:
    """Raises ConfigError if a hook on the submodule ``path`` would not act, or its features have another layout."""
    where = f"slot {name}: {path}"
    chain = list(_chain(model, path))
    module = chain[-1]
    for part in chain:
        if is_compiled(part):
            raise ConfigError(
                f"{where} lies in a compiled part, which does not see seeds that come and go: pass the model before "
                "torch.compile or torch.jit, and compile what grower.finish() returns"
            )
        require_stays(where, part)
        if isinstance(part, nn.MultiheadAttention) and part is not module:
            raise ConfigError(
                f"{where} is a part of nn.MultiheadAttention, which reads its weights and never calls it: name the "
                "attention module itself, or the layer around it"
            )
    kind = type(module)
    if getattr(kind.forward, "__name__", "") == "_forward_unimplemented":
        raise ConfigError(f"{where} is a {kind.__name__}, which is never called: name one of its items")
    if topology in SEQUENCES and any(map(_is_time_first, chain)):
        raise ConfigError(f"{where} returns [T, B, D]: samples must come first, so make it with batch_first=True")


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of ``module`` run code that torch.compile or torch.jit made of it."""
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
        return True
    if module._compiled_call_impl is not None:
        return True
    return hasattr(module.forward, "_torchdynamo_orig_callable")


def check_channels(where: str, module: nn.Module, h: Tensor) -> None:
    """Raises ConfigError if ``module`` returns images [B, H, W, C] where [B, C, H, W] is needed."""
    first = False
    last = False
    for layer in module.modules():
        if isinstance(layer, CHANNELS_FIRST) and width_of(layer) == h.shape[1]:
            first = True
        if isinstance(layer, CHANNELS_LAST) and width_of(layer) == h.shape[-1]:
            last = True
    if last and not first:
        raise ConfigError(
            f"{where} returns shape {tuple(h.shape)} with the channels last, as its layers show; cnn seeds need "
            "[B, C, H, W]: leave out topology, or name a submodule whose output has that layout"
        )


CHANNELS_FIRST = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.GroupNorm,
)
"""Layers with their channels before the positions."""
CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.RNNBase, nn.MultiheadAttention)
"""Layers with their channels behind the positions."""
CHANNELS = CHANNELS_FIRST + CHANNELS_LAST


def width_of(layer: nn.Module) -> int | None:
    """Returns the number of channels that a layer returns; None if it does not say."""
    if isinstance(layer, nn.RNNBase):
        units = layer.proj_size or layer.hidden_size
        return 2 * units if layer.bidirectional else units
    for attribute in ("out_channels", "out_features", "num_features", "num_channels", "embedding_dim", "embed_dim"):
        width = getattr(layer, attribute, None)
        if isinstance(width, int):
            return width
    shape = getattr(layer, "normalized_shape", None)
    if not shape:
        return None
    return int(shape[-1])


def _chain(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yields the modules on the way to the submodule ``path``, the model first."""
    module = model
    yield module
    for name in path.split("."):
        module = getattr(module, name)  # get_submodule is missing in scripted modules
        yield module


def _is_time_first(module: nn.Module) -> bool:
    """Whether a recurrent layer or transformer of torch has its samples in the second dimension."""
    if isinstance(module, nn.Sequential):
        return len(module) > 0 and _is_time_first(module[-1])
    if not type(module).__module__.startswith("torch.nn."):
        return False
    return any(getattr(layer, "batch_first", True) is False for layer in module.modules())
