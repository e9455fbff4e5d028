"""Comparing what two networks compute, whatever the form of their outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

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


def _members(output: object) -> Iterable[object]:
    if isinstance(output, Mapping):
        return output.values()
    if isinstance(output, list | tuple):
        return output
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [getattr(output, field.name) for field in dataclasses.fields(output)]
    if callable(output):  # a function, a class, a module
        return ()
    return list(getattr(output, "__dict__", {}).values())


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
