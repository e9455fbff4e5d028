"""A validation or test split that does not fit in memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import Dataset

from esper.config import ConfigError
from esper.data.shared_batches import BatchReader, stack_samples
from esper.data.split import SAMPLE, Split, unusable_sample
from esper.hosts.inputs import form_of

CHUNK = 256
"""Samples that are read at once when a split is made."""


@dataclass(frozen=True)
class StreamedSplit(Split):
    """A split whose inputs a map-style dataset reads batch by batch, whenever they are needed.

    ``x`` holds a few of the inputs, and ``y`` all targets. Rows are read by the thread that needs them, by one at a
    time, since datasets are seldom made for several.
    """

    dataset: Dataset[tuple[Any, Any]] = field(kw_only=True)
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)

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
