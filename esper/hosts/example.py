"""Runs networks on an example without a trace in them, compares what they return, and counts their operations."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from inspect import unwrap
from types import MethodType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch._C._functorch import maybe_current_level
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper.config import ConfigError
from esper.hosts.host import kept_modes
from esper.ops.torch_state import kept_generators


def as_it_is(output: object) -> object:
    return output


def outputs_of(
    network: nn.Module,
    example: Any,
    read: Callable[[object], object] = as_it_is,
    training: bool = False,
) -> list[Tensor]:
    """Returns the tensors that ``network`` returns for ``example``, each time with equal random numbers.

    It runs in eval mode if it is not ``training``, and is as before afterwards, with its modes, buffers and attributes.
    Products of float32 have the precision of float32, whatever is set for training, so that outputs can be compared.
    """
    return outputs_for(network, *arguments_of(example), read, training)


def outputs_for(
    network: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    read: Callable[[object], object] = as_it_is,
    training: bool = False,
) -> list[Tensor]:
    """As :func:`outputs_of`, for arguments that the network may overwrite."""
    if any(isinstance(value, Iterator) for value in (*arguments, *keywords.values())):
        raise ConfigError("an argument of the network is an iterator, which one pass uses up: pass a list")
    try:
        with torch.no_grad(), as_before(network) as gpus, full_products():
            torch.default_generator.manual_seed(0)
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002  models may draw from it
            for gpu in gpus:
                torch.cuda.default_generators[gpu.index].manual_seed(0)
            network.train(training)
            output = read(network(*arguments, **keywords))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the network cannot run on the example: {type(error).__name__}: {error} (a dict holds arguments by name, "
            "and a tuple those by position; put a single argument that is one of these in a tuple)"
        ) from error
    found = list(tensors_in(output))
    if not found:
        raise ConfigError(f"the network returns {type(output).__name__} for the example, in which there is no tensor")
    return found


def require_outputs(classes: int, outputs: Sequence[Tensor]) -> None:
    """Raises ConfigError if no dimension of a network's ``outputs`` [N, ...] has room for the scores of ``classes``.

    One output is enough for two classes, and outputs without other dimensions than samples may be losses.
    """
    shapes = [tuple(output.shape) for output in outputs if output.dim() > 1]
    most = max((size for shape in shapes for size in shape[1:]), default=classes)
    if most >= classes or (most, classes) == (1, 2):
        return
    if len(shapes) == 1 and len(shapes[0]) == 2:
        raise ConfigError(f"classes is {classes}, more than the outputs of the model for a sample, {most}")
    raise ConfigError(f"classes is {classes}, and the model returns fewer scores: {', '.join(map(str, shapes))}")


@contextmanager
def as_before(network: nn.Module) -> Iterator[list[torch.device]]:
    """Restores modes, buffers and attributes of ``network``, and random numbers; yields the GPUs that it is on."""
    devices = set()
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.device.type == "cuda":
            devices.add(tensor.device)
    gpus = sorted(devices, key=str)
    with kept_state(network), kept_modes(network), kept_generators(gpus):
        yield gpus


@contextmanager
def full_products() -> Iterator[None]:
    """Within it, float32 products are computed in float32, and not in TF32 or bfloat16, as may be set for training.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices
    """
    backends: Any = torch.backends
    settings = [
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
        backends.mkldnn.rnn,
    ]
    before = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns copies of the arguments by position and by name: the network may overwrite its inputs.

    A named tuple, such as a packed sequence, is a single argument.
    """
    copied = cloned(example)
    if isinstance(copied, Mapping):
        return (), dict(copied)
    if isinstance(copied, tuple) and not hasattr(copied, "_fields"):
        return copied, {}
    return (copied,), {}


def cloned(values: Any) -> Any:
    """Returns a deep copy of nested values and their tensors; what has no copy, such as a file, is itself."""
    # Tensors are cloned: deepcopy takes no part of a graph, and copies all of the data that a tensor is a part of.
    memo = {id(tensor): tensor.detach().clone() for tensor in tensors_in(values)}
    return _copied(values, memo)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copies ``value`` deeply; members of containers that cannot be copied are shared.

    ``memo`` maps the ids of objects to copies that are there already.
    """
    try:
        return copy.deepcopy(value, dict(memo))
    except Exception:  # whatever a user's class raises
        if type(value) is dict:
            return {key: _copied(member, memo) for key, member in value.items()}
        if type(value) in (list, tuple):
            return type(value)(_copied(member, memo) for member in value)
        return value


@contextmanager
def kept_state(network: nn.Module) -> Iterator[None]:
    """Restores buffers and attributes of every module: a pass may count its calls, or keep a state for the next."""
    buffers = [(module, dict(module._buffers)) for module in network.modules()]
    contents = _Contents()
    for buffer in network.buffers():
        contents.note(buffer)
    try:
        with kept_attributes(network):
            yield
    finally:
        for module, present in buffers:
            module._buffers.clear()
            module._buffers.update(present)
        contents.restore()


@contextmanager
def kept_attributes(network: nn.Module) -> Iterator[None]:
    """Restores what the modules of ``network`` keep elsewhere than in parameters and buffers.

    That is their attributes, with the contents of tensors, arrays, containers and objects that hold no more than these.
    """
    attributes = [(module, dict(vars(module))) for module in network.modules()]
    contents = _Contents()
    for _, present in attributes:
        for name, value in present.items():
            if name not in _OF_TORCH:
                contents.note(value)
    try:
        yield
    finally:
        for module, present in attributes:
            for name in vars(module).keys() - present.keys():
                del vars(module)[name]
            vars(module).update(present)
        contents.restore()


_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of each module, such as its hooks, which may come and go in a pass."""
_CHANGING = (
    list,
    dict,
    set,
    deque,
    OrderedDict,
    defaultdict,
)
"""Containers whose contents change; exactly these, as others may do more than to contain."""
_DATA = (
    *_CHANGING,
    tuple,
    Tensor,
    np.ndarray,
    int,
    float,
    str,
    type(None),
)


class _Contents:
    """The present contents of tensors, arrays and containers, and of those in these containers."""

    def __init__(self) -> None:
        self._tensors: list[_Value] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._known: set[int] = set()

    def note(self, value: Any) -> None:
        kind = type(value)
        if kind in (int, str, float, bool) or value is None or id(value) in self._known:
            return
        self._known.add(id(value))
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and not value.is_inference():
                self._tensors.append(_Value(value))
        elif kind is np.ndarray:
            self._arrays.append((value, value.copy()))
        elif kind in _CHANGING or isinstance(value, tuple):
            if kind in _CHANGING:
                self._containers.append((value, copy.copy(value)))
            members = value
            if isinstance(value, dict):
                members = value.values()
            for member in list(members):
                self.note(member)
        elif _is_data(value):
            self.note(vars(value))

    def restore(self) -> None:
        for value in self._tensors:
            value.restore()
        for array, before in self._arrays:
            array[...] = before
        for container, before in self._containers:
            container.clear()
            if isinstance(container, dict | set):
                container.update(before)
            else:
                container.extend(before)


def _is_data(value: Any) -> bool:
    """Whether an object, such as a counter, only holds data; others may be locked, shared or large."""
    held = getattr(value, "__dict__", None)
    if type(held) is not dict or callable(value):
        return False
    return all(isinstance(member, _DATA) for member in held.values())


class _Value:
    """The present value of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version
        self._before = tensor.detach().clone()

    def restore(self) -> None:
        # Others may be expanded, which cannot be written to, or a part of a graph that is still to run backward.
        if self._tensor._version != self._version or _differ(self._tensor, self._before):
            with torch.no_grad():
                self._tensor.copy_(self._before)


def _differ(buffer: Tensor, value: Tensor) -> bool:
    """Whether a buffer has other numbers than before: a BatchNorm of torch does not count its changes of statistics."""
    if not buffer.is_floating_point() or buffer.layout is not torch.strided:
        return False
    return not torch.allclose(buffer, value, rtol=0, atol=0, equal_nan=True)


TOLERANCE = 1e-4
"""Max difference of float32 outputs that only rounding makes, in units of the largest output."""


def tensors_in(output: object, outer: tuple[object, ...] = ()) -> Iterator[Tensor]:
    """Yields the tensors in nested tuples, lists, dicts, dataclasses and objects like the outputs of Hugging Face.

    Of other objects, such as a distribution, those in attributes; ``outer`` are objects that are being searched.
    """
    if isinstance(output, Tensor):
        yield output
        return
    if any(output is known for known in outer):
        return
    for value in _members(output):
        yield from tensors_in(value, (*outer, output))


def samples_in(tensors: Iterable[Tensor]) -> int | None:
    """Returns the first dimension of the first of the ``tensors`` that an input has; None without one.

    A square matrix among others is passed over: it is probably a mask of positions.
    """
    inputs = [tensor for tensor in tensors if tensor.dim()]
    for tensor in inputs:
        if tensor.dim() != 2 or tensor.shape[0] != tensor.shape[1]:
            return len(tensor)
    return len(inputs[0]) if inputs else None


def is_transformed() -> bool:
    """Whether the code runs within a transform of ``torch.func``, such as ``vmap``, whose tensors must not be kept."""
    return maybe_current_level() is not None


def _members(output: object) -> Iterable[object]:
    if isinstance(output, Mapping):
        return output.values()
    if isinstance(output, list | tuple | deque):
        return output
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [getattr(output, field.name) for field in dataclasses.fields(output)]
    if callable(output):  # a function, a class, a module
        return ()
    slots = getattr(type(output), "__slots__", ())
    if isinstance(slots, str):
        slots = (slots,)
    members = list(getattr(output, "__dict__", {}).values())
    members += [getattr(output, name, None) for name in slots]
    return members


def difference(
    one: object,
    other: object,
    rounding: torch.dtype = torch.float64,
) -> str | None:
    """Describes how two outputs differ by more than rounding; None if they do not.

    Tensors must have equal shapes and dtypes. Values may differ by what their dtype rounds: by ``TOLERANCE`` of the
    largest value in float32, more in half precision, less in float64. Values that are not finite must be equal.
    ``rounding`` is the dtype of coarser values that the outputs were computed from, if any.
    """
    first = list(tensors_in(one))
    second = list(tensors_in(other))
    if len(first) != len(second):
        return f"there are {len(first)} tensors in one output and {len(second)} in the other"
    for a, b in zip(first, second, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{a.dtype} of shape {tuple(a.shape)} against {b.dtype} of shape {tuple(b.shape)}"
        gap, scale = largest_difference(a, b)
        allowed = tolerance(a.dtype)
        if a.is_floating_point():
            allowed = max(allowed, tolerance(rounding))
        if not gap <= allowed * max(1.0, scale):  # also if the gap is not a number
            return f"values differ by {gap:.3g}, of up to {scale:.3g}"
    return None


def largest_difference(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Returns the largest difference of two tensors of one shape, and the largest absolute value of the first."""
    if a.layout != torch.strided:
        a = a.to_dense()
        b = b.to_dense()
    if not a.numel():
        return 0.0, 0.0
    if not a.is_floating_point() and not a.is_complex():
        return float((a != b).any()), 0.0
    wide = torch.complex128 if a.is_complex() else torch.float64
    a = a.detach().to("cpu", wide)
    b = b.detach().to("cpu", wide)
    same = (a == b) | (a.isnan() & b.isnan())  # infinities, too
    gap = torch.where(same, 0.0, (a - b).abs()).max()
    sizes = a.abs()
    finite = sizes[sizes.isfinite()]
    if not len(finite):
        return float(gap), 0.0
    return float(gap), float(finite.max())


def tolerance(dtype: torch.dtype) -> float:
    """Returns the difference that rounding makes in outputs of ``dtype``, in units of the largest output."""
    if not dtype.is_floating_point and not dtype.is_complex:
        return 0.0
    unit = torch.finfo(dtype).eps
    # 1e-4 is about 1,000 units in the last place of float32. As many of half precision would pass anything: 8.
    if unit > 1e-4:
        return 8 * unit
    return TOLERANCE * unit / torch.finfo(torch.float32).eps


def coarsest_dtype(network: nn.Module) -> torch.dtype:
    """Returns the dtype of the network's parameters that rounds most: bfloat16, float16, float32 or float64."""
    present = {parameter.dtype for parameter in network.parameters()}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if dtype in present:
            return dtype
    return torch.float64


class _NoModules(nullcontext[None]):
    """Replaces the counter's module tracker.

    The tracker hooks into the gradients of module inputs, which fails if autograd is asked for the gradient of that
    very tensor, as shadow passes do.
    """

    parents = frozenset({"Global"})


class PassCounter(FlopCounterMode):
    """Counts all operations of a pass, regardless of the module.

    It calls the counter without the decorator that hides it from ``torch.compile``. At its first call the decorator
    imports the compiler: a second and 70 MB of every process.
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self.mod_tracker = _NoModules()  # type: ignore[assignment]

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        mode: Any = self.mode
        count = unwrap(type(mode).__torch_dispatch__)
        mode.__torch_dispatch__ = MethodType(count, mode)
        return self

    def __exit__(self, *args: object) -> None:
        mode: Any = self.mode
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        del mode.__torch_dispatch__  # which refers to the mode


@contextmanager
def counting() -> Iterator[PassCounter]:
    """Counts the floating-point operations of a block by PyTorch's own counter.

    It covers matrix products, also those of attention, and convolutions, at two operations per multiply-accumulate.
    Normalisation and activations, among them all operators of ``esper.ops``, are not counted.
    """
    with PassCounter() as counter, sdpa_kernel(SDPBackend.MATH):
        yield counter
