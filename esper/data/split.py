"""A split: samples and their targets, in memory or read on demand, and checks that they can be trained on."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from esper.config import ConfigError
from esper.data.objective import PAD
from esper.hosts.inputs import Inputs, as_inputs, empty_like, form_of, stack, tensors_of
from esper.ops.stage_batch import stage_images

SAMPLE = 3
"""Number of inputs on which networks are tried."""
MAX_CHANNELS = 32
"""Max channels of images stored as bytes."""
CHUNK = 256
"""Samples that are read at once when a streamed split is made."""

Batch = tuple[Any, Tensor]
"""Inputs [batch_size, ...], one tensor or ``Arguments``, and targets [batch_size, ...]."""


@dataclass(frozen=True)
class Split:
    """Samples in memory: inputs x [N, ...], and targets y [N, ...]: int64 [N] for classes, [N, T] for tokens, and of
    any other dtype and shape for a loss of the task's own.

    Inputs of a model that takes several are a dict of its arguments by name, or a tuple of them, as in ``Arguments``.

    With a ``table``, float32 [C, 256], inputs are images stored as bytes, x uint8 [N, H, W, C], and networks see
    ``table[c, pixel]`` as float32 [B, C, H, W] in channels_last.
    """

    x: Any
    y: Tensor
    table: Tensor | None = None
    text: Tensor | None = None
    """Tokens int64 [N · T + 1] that x and y are views of: row n of x starts at token n · T, that of y one later. None
    for other data."""

    in_memory = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", as_inputs(self.x))

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        x, y = form_of(self.x, of_sample=True), form_of(self.y, of_sample=True)
        return f"{type(self).__name__}({len(self):,} samples: x {x}, y {y})"

    @classmethod
    def of_text(cls, tokens: Tensor, length: int) -> Split:
        """Cuts tokens int64 [M] into inputs and targets int64 [N, length]; N = (M − 1) // length, the rest is dropped.

        ``length`` is the number of tokens of a row.

        The target of a token is the next one. Rows do not overlap, and inputs and targets share memory. Raises
        ValueError if N would be 0.
        """
        count = max(0, len(tokens) - 1) // length
        if count == 0:
            raise ValueError(f"{len(tokens)} tokens make no sequence of {length} with its targets")
        text = tokens[: count * length + 1]
        return cls(text[:-1].view(-1, length), text[1:].view(-1, length), text=text)

    def evenly_spaced(self, count: int) -> Split:
        """Returns a copy of ``count`` samples spread evenly over the split, or of all if there are no more."""
        rows = self._spread(count)
        return Split(self.x[rows], self.y[rows], self.table)

    def _spread(self, count: int) -> Tensor:
        """Returns ``count`` rows spread evenly, the first and the last included, or all; int64."""
        count = min(count, len(self))
        return torch.linspace(0, len(self) - 1, count, dtype=torch.float64).round().long()

    def to(self, device: torch.device) -> Split:
        """Returns the split with its tensors on ``device``."""
        if self.text is not None:
            return Split.of_text(self.text.to(device), self.x.shape[1])
        table = None if self.table is None else self.table.to(device)
        return Split(self.x.to(device), self.y.to(device), table)

    def inputs(self, first: int, last: int, dtype: torch.dtype = torch.float32) -> Any:
        """Returns samples ``first`` to ``last`` − 1 as networks see them; ``dtype`` applies to images from bytes."""
        if self.table is None:
            return self.x[first:last]
        rows = torch.arange(first, min(last, len(self)), device=self.x.device)
        images, _ = stage_images(self.x, rows, self.table, out=self.empty(len(rows), dtype))
        return images

    def empty(self, count: int, dtype: torch.dtype = torch.float32) -> Any:
        """Allocates an uninitialised buffer for ``count`` inputs; ``dtype`` as in :meth:`inputs`."""
        if self.table is None:
            return empty_like(self.x, count)
        _, height, width, channels = self.x.shape
        shape = (count, channels, height, width)
        return torch.empty(
            shape,
            dtype=dtype,
            device=self.x.device,
            memory_format=torch.channels_last,
        )

    def check(self, name: str, classes: int | None) -> None:
        """Raises ConfigError, starting with ``name``, if the split cannot be trained on.

        ``classes`` is their number if targets are classes or tokens.
        """
        problem = next(self._problems(classes), None)
        if problem is not None:
            raise ConfigError(f"{name}: {problem}")

    def _problems(self, classes: int | None) -> Iterator[str]:
        """Yields the reasons why the split cannot be trained on; a check relies on the ones before it."""
        if len(self.x) != len(self.y) or not len(self.y):
            yield f"{len(self.x)} inputs and {len(self.y)} targets; expected as many, 1 or more"
        if self.table is not None:
            yield from self._table_problems(self.table)
        if classes is not None and (self.y.dtype != torch.int64 or self.y.dim() not in (1, 2)):
            yield (
                f"targets are {self.y.dtype} of shape {tuple(self.y.shape)}; expected int64, [N] or [N, T], or "
                "classes=None with a loss for these targets, such as mse or bce"
            )
        fault = unusable_sample(self.x, self.y, classes)
        if fault is not None:
            sample, reason = fault
            yield f"sample {sample}: {reason}"
        if classes is not None and self.y.dim() == 2:
            padded = (self.y == PAD).flatten(1).all(dim=1)
            if padded.any():
                yield f"sample {int(padded.int().argmax())} contains only padding ({PAD})"

    def _table_problems(self, table: Tensor) -> Iterator[str]:
        x = self.x
        y = self.y
        fits = (
            x.dtype == torch.uint8
            and x.dim() == 4
            and min(x.shape) > 0
            and x.shape[-1] <= MAX_CHANNELS
            and table.dtype == torch.float32
            and tuple(table.shape) == (x.shape[-1], 256)
            and (y.dtype != torch.int64 or y.dim() == 1)
        )
        if not fits or not all(tensor.is_contiguous() for tensor in (x, y, table)):
            yield (
                f"with a table, inputs are uint8 [N, H, W, C] of 1 to {MAX_CHANNELS} channels, targets [N], and the "
                "table is float32 [C, 256] (esper.ops.stage_batch.normalisation_table), all contiguous; not "
                f"{x.dtype} {tuple(x.shape)}, {y.dtype} {tuple(y.shape)} and {table.dtype} {tuple(table.shape)}, "
                f"contiguous: {x.is_contiguous()}, {y.is_contiguous()}, {table.is_contiguous()}"
            )


def unusable_sample(x: Inputs, y: Tensor, classes: int | None) -> tuple[int, str] | None:
    """Returns the index of the first sample that cannot be trained on and the reason, or None.

    Inputs x [N, ...] must be finite, and targets y [N, ...] between 0 and ``classes`` − 1, or padding of tokens; if
    that is None, finite.
    """
    for inputs in tensors_of(x):
        sample = _not_finite(inputs)
        if sample is not None:
            return sample, "its inputs are not finite"
    sample = _not_finite(y)
    if sample is not None:
        return sample, "its targets are not finite"
    if classes is None:
        return None
    legal = (y >= 0) & (y < classes)
    padding = ""
    if y.dim() > 1:
        legal |= y == PAD
        padding = f"; padding of tokens is {PAD}"
    if legal.all():
        return None
    sample = int((~legal.reshape(len(y), -1).all(dim=1)).int().argmax())
    wrong = int(y[sample][~legal[sample]].flatten()[0])
    return sample, f"target {wrong} is not between 0 and {classes - 1}{padding}"


def _not_finite(values: Tensor) -> int | None:
    """Returns the index of the first sample with a value that is not finite; None if all are finite."""
    if not values.is_floating_point():
        return None
    finite = values.isfinite().reshape(len(values), -1).all(dim=1)
    if finite.all():
        return None
    return int((~finite).int().argmax())


class BatchReader(Dataset[Batch], ABC):
    """A map-style data set that reads all rows of a batch in one call, and draws nothing at random."""

    @abstractmethod
    def batch(self, rows: Sequence[int]) -> Batch:
        """Returns inputs and targets of ``rows``, each [len(rows), ...]."""


def stack_samples(samples: Sequence[Batch]) -> Batch:
    """Puts samples (x, y) together to inputs and targets, each [len(samples), ...]."""
    x = stack([x for x, _ in samples])
    y = torch.stack([torch.as_tensor(y) for _, y in samples])
    return x, y


@dataclass(frozen=True, repr=False)
class StreamedSplit(Split):
    """A split whose inputs a map-style dataset reads batch by batch, whenever they are needed.

    ``x`` holds a few of the inputs, and ``y`` all targets. Rows are read by the thread that needs them, by one at a
    time, since datasets are seldom made for several.
    """

    dataset: Dataset[tuple[Any, Any]] = field(kw_only=True)
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False)

    in_memory = False

    @classmethod
    def of(cls, dataset: Dataset[tuple[Any, Any]], name: str, classes: int | None) -> StreamedSplit:
        """Reads all samples once, for their targets. Raises ConfigError, starting with ``name``, for a bad one."""
        count = len(dataset)  # type: ignore[arg-type]
        targets = []
        form = ""
        for first in range(0, count, CHUNK):
            rows = list(range(first, min(first + CHUNK, count)))
            try:
                x, y = read(dataset, rows)
            except Exception as error:  # whatever a user's data set raises
                raise ConfigError(f"{name}: reading rows from {first} on: {type(error).__name__}: {error}") from error
            chunk_form = form_of(x, of_sample=True)
            form = form or chunk_form
            if chunk_form != form:
                raise ConfigError(f"{name}: rows from {first} on are {chunk_form}, not {form}")
            fault = unusable_sample(x, y, classes)
            if fault is not None:
                sample, reason = fault
                raise ConfigError(f"{name}: sample {first + sample}: {reason}")
            targets.append(y)
        if not targets:
            raise ConfigError(f"{name}: it has no samples")
        few, _ = read(dataset, list(range(min(SAMPLE, count))))
        return cls(few, torch.cat(targets), dataset=dataset)

    def inputs(self, first: int, last: int, dtype: torch.dtype = torch.float32) -> Any:
        """Reads samples ``first`` to ``last`` − 1; ``dtype`` has no effect."""
        rows = list(range(first, min(last, len(self))))
        with self.lock:
            x, _ = read(self.dataset, rows)
        return x.to(self.y.device)

    def to(self, device: torch.device) -> StreamedSplit:
        return replace(self, x=self.x.to(device), y=self.y.to(device))

    def evenly_spaced(self, count: int) -> Split:
        """Reads ``count`` samples spread evenly over the split, or all, into memory."""
        x, y = read(self.dataset, self._spread(count).tolist())
        return Split(x, y).to(self.y.device)

    def check(self, name: str, classes: int | None) -> None:
        """Does nothing: :meth:`of` has checked every sample."""


def read(dataset: Dataset[tuple[Any, Any]], rows: list[int]) -> tuple[Any, torch.Tensor]:
    """Returns inputs and targets of ``rows``, [len(rows), ...]."""
    if isinstance(dataset, BatchReader):
        return dataset.batch(rows)
    return stack_samples([dataset[row] for row in rows])
