"""Batches for many envs from one data set that does not fit in memory.

One loader with persistent workers serves all envs. At every step it reads one batch per env, all of equal size, with
rows from the env's own index stream, so an env's batches depend neither on the number of workers nor on other envs.
Random draws in rows (augmentation) are reproducible, too: the global generators are seeded for every batch from the
rows of its epoch and its place in it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from esper.data.rng import drawing_from, epoch_seed
from esper.data.task import PAD
from esper.telemetry.span import Spans

Batch = tuple[Tensor, Tensor]
"""Inputs [batch_size, ...] and targets [batch_size, ...]."""


class BatchReader(Dataset[Batch], ABC):
    """A map-style data set that reads all rows of a batch in one call, and draws nothing at random."""

    @abstractmethod
    def batch(self, rows: Sequence[int]) -> Batch:
        """Returns inputs and targets of ``rows``, each [len(rows), ...]."""


class SharedBatchError(RuntimeError):
    """Raised for a step without a batch of the right size for every env, or for data that cannot be read or used.

    ``env`` is the env of the batch, or None if all are affected; ``batch`` is the number of the step in its epoch.
    """

    def __init__(self, message: str, env: int | None = None, batch: int | None = None) -> None:
        super().__init__(message)
        self.env, self.batch = env, batch


def worker_died(error: BaseException) -> bool:
    """True for the error that torch raises, anywhere in the main thread, when a loader's worker dies."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")


@dataclass(frozen=True)
class Expected:
    """The shapes, dtype and classes that a network was made for; every batch must match them."""

    inputs: tuple[int, ...]
    """Shape of one input."""
    dtype: torch.dtype
    targets: tuple[int, ...]
    classes: int

    @classmethod
    def like(cls, x: Tensor, y: Tensor, classes: int) -> Expected:
        """Takes the shapes and the dtype from inputs x [n, ...] and targets y [n, ...]."""
        return cls(tuple(x.shape[1:]), x.dtype, tuple(y.shape[1:]), classes)

    def fault(self, x: Tensor, y: Tensor) -> tuple[int, str] | None:
        """Returns the index of the first invalid sample of a batch and the reason; None if all are valid."""
        found = (tuple(x.shape[1:]), x.dtype, tuple(y.shape[1:]), y.dtype)
        wanted = (self.inputs, self.dtype, self.targets, torch.int64)
        if found != wanted:
            forms = [f"inputs {s[1]} of shape {s[0]} and targets {s[3]} of shape {s[2]}" for s in (found, wanted)]
            return 0, f"{forms[0]}; expected {forms[1]}"
        if x.is_floating_point():
            finite = x.isfinite().flatten(1).all(dim=1)
            if not finite.all():
                return int((~finite).int().argmax()), "its inputs are not finite"
        legal = ((y >= 0) & (y < self.classes)) | (y == PAD) if y.dim() > 1 else (y >= 0) & (y < self.classes)
        if not legal.all():
            place = int((~legal.view(len(y), -1).all(dim=1)).int().argmax())
            wrong = y[place][~legal[place]].flatten()[0]
            return place, f"target {int(wrong)} is none of 0 to {self.classes - 1}"
        return None


class IndexStream(Protocol):
    """The stream of rows that an env sees."""

    def draw(self, count: int) -> Tensor:
        """Draws the rows of the env's next epoch, int64 [count]."""


class Permutations:
    """A new permutation of ``size`` rows every epoch, drawn from the env's own generator."""

    def __init__(self, size: int, generator: torch.Generator) -> None:
        self.size, self.generator = size, generator

    def draw(self, count: int) -> Tensor:
        return torch.randperm(self.size, generator=self.generator)[:count]


class SharedBatchIterator:
    """Epochs of ``steps`` batches for every env.

    Args:
        dataset: map-style, rows (x, y) of equal shapes.
        streams: one index stream per env.
        batch_size: rows per batch of one env.
        steps: batches per epoch.
        workers: number of reader processes, which live until :meth:`close`; 0 reads in this process.
        expected: shapes and dtype that batches must have; None does not check them.
        pinned: whether batches lie in page-locked memory, from which a GPU copies without blocking the CPU.

    Raises ValueError without streams, for a batch_size or steps below 1, for negative workers, and if an epoch needs
    more rows than the data has.
    """

    def __init__(
        self,
        dataset: Dataset[Batch],
        streams: Sequence[IndexStream],
        batch_size: int,
        steps: int,
        workers: int = 0,
        expected: Expected | None = None,
        pinned: bool = False,
    ) -> None:
        rows = len(dataset)  # type: ignore[arg-type]
        if not streams or min(batch_size, steps) < 1 or workers < 0:
            raise ValueError(
                f"one stream or more, batch_size and steps of 1 or more and workers of 0 or more; not {len(streams)} "
                f"streams, batch_size={batch_size}, steps={steps}, workers={workers}"
            )
        if batch_size * steps > rows:
            raise ValueError(f"{steps} batches of {batch_size} take {steps * batch_size} rows; the data has {rows}")
        self.streams = tuple(streams)
        self.batch_size = batch_size
        self.steps = steps
        self.worker_pids: frozenset[int] = frozenset()
        """Ids of the processes that have read for the current epoch."""
        self.spans = Spans()
        """Records the time spent waiting for data, as ``stage``; an env replaces it with its own."""
        self._plan = _Plan(self.streams, rows, batch_size, steps)
        self._loader: DataLoader[_Step] | None = DataLoader(
            _Steps(dataset, expected),
            sampler=self._plan,
            batch_size=None,  # the loader's item is a whole step, assembled in a worker
            collate_fn=_unchanged,
            worker_init_fn=_apart,
            num_workers=workers,
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # its own, since a loader draws a seed for its workers every epoch
            pin_memory=pinned,  # by a thread of this process, see _Step.pin_memory
        )
        self._epoch = 0
        self._reading: Iterator[_Step] | None = None

    def epoch(self) -> Iterator[list[Batch]]:
        """Yields ``steps`` lists with one (x, y) per env.

        Starting an epoch ends an unfinished earlier one. Raises SharedBatchError if a stream returns invalid rows, if
        rows cannot be read, if a worker has died, or if a newer epoch or :meth:`close` has ended this one.
        """
        if self._loader is None:
            raise SharedBatchError("the batches are closed")
        self._epoch += 1
        self.worker_pids = frozenset()
        self._plan.draw()
        self._reading = iter(self._loader)
        return self._steps_of(self._epoch)

    def _steps_of(self, epoch: int) -> Iterator[list[Batch]]:
        for step in range(self.steps):
            if epoch != self._epoch or self._reading is None:
                raise SharedBatchError("this epoch is over: a newer one has begun, or the batches were closed")
            try:
                with self.spans("stage"):
                    read = next(self._reading)
            except StopIteration:
                raise SharedBatchError(f"the loader ended after {step} of {self.steps} steps", batch=step) from None
            except (RuntimeError, EOFError, OSError) as error:  # a killed worker shows up as one of these
                raise SharedBatchError(
                    f"reading step {step} of {self.steps}: a worker died: {error or type(error).__name__}", batch=step
                ) from error
            yield self._checked(step, read)

    def _checked(self, step: int, read: _Step) -> list[Batch]:
        if read.failure is not None:
            raise SharedBatchError(f"reading step {step} of {self.steps}, {read.failure}", read.env, step)
        if len(read.batches) != len(self.streams):
            raise SharedBatchError(
                f"step {step} has {len(read.batches)} batches for {len(self.streams)} envs", batch=step
            )
        for env, (x, y) in enumerate(read.batches):
            if len(x) != self.batch_size or len(y) != self.batch_size:
                raise SharedBatchError(
                    f"step {step}: env {env} has {len(x)} inputs and {len(y)} targets, not {self.batch_size} of each",
                    env,
                    step,
                )
        self.worker_pids |= {read.pid}
        return read.batches

    def close(self) -> None:
        """Ends the workers; a second call does nothing."""
        # A loader ends its workers only when nothing refers to it or its iterator any more.
        self._reading = None
        self._loader = None

    def __enter__(self) -> SharedBatchIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Step:
    """A worker's result for one step: the batches of all envs, or the reason of a failure."""

    pid: int
    batches: list[Batch]
    failure: str | None = None
    env: int | None = None
    """The env whose batch failed."""

    def pin_memory(self) -> _Step:
        """Copies the batches to page-locked memory; the loader calls this method by name."""
        return replace(self, batches=[(x.pin_memory(), y.pin_memory()) for x, y in self.batches])


Ask = tuple[int, list[int]]
"""A batch to read: the seed of its random draws, and its rows."""


class _Plan(Sampler[list[Ask]]):
    """The rows of each env at each step; a whole epoch is drawn at once, however far ahead workers read."""

    def __init__(self, streams: tuple[IndexStream, ...], rows: int, batch_size: int, steps: int) -> None:
        self.streams, self.rows, self.batch_size, self.steps = streams, rows, batch_size, steps
        self.drawn: list[tuple[int, Tensor]] = []
        """The epoch's seed and rows [steps, batch_size] for each env."""

    def draw(self) -> None:
        count = self.steps * self.batch_size
        self.drawn = []
        for env, stream in enumerate(self.streams):
            rows = stream.draw(count)
            if rows.dtype != torch.int64 or tuple(rows.shape) != (count,):
                raise SharedBatchError(
                    f"the stream of env {env} gave {rows.dtype} {list(rows.shape)}, not torch.int64 [{count}]"
                )
            if int(rows.min()) < 0 or int(rows.max()) >= self.rows:
                raise SharedBatchError(
                    f"the stream of env {env} gave rows {int(rows.min())} to {int(rows.max())}; "
                    f"the data has 0 to {self.rows - 1}"
                )
            self.drawn.append((epoch_seed(rows), rows.view(self.steps, self.batch_size)))

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[Ask]]:
        for step in range(self.steps):
            yield [(seed + step, rows[step].tolist()) for seed, rows in self.drawn]


class _Steps(Dataset["_Step"]):
    """Reads all batches of one step. A failure is sent as a message, since not every exception can be pickled."""

    def __init__(self, dataset: Dataset[Batch], expected: Expected | None) -> None:
        self.dataset, self.expected = dataset, expected

    def __getitem__(self, asked: list[Ask]) -> _Step:
        batches: list[Batch] = []
        for env, (seed, mine) in enumerate(asked):
            row = mine[0]
            try:
                pairs: list[Any] = []
                if isinstance(self.dataset, BatchReader):
                    x, y = self.dataset.batch(mine)
                else:
                    with drawing_from(seed):
                        for row in mine:
                            pairs.append(self.dataset[row])
                    x, y = torch.stack([x for x, _ in pairs]), torch.stack([torch.as_tensor(y) for _, y in pairs])
                wrong = None if self.expected is None else self.expected.fault(x, y)
                if wrong is not None:
                    return _Step(os.getpid(), [], f"env {env}, row {mine[wrong[0]]}: {wrong[1]}", env)
                batches.append((x, y))
            except Exception as error:
                where = f"env {env}, row {row}" if len(pairs) < len(mine) else f"env {env}, putting rows together"
                return _Step(os.getpid(), [], f"{where}: {type(error).__name__}: {error}", env)
        return _Step(os.getpid(), batches)


def _apart(_worker: int) -> None:
    """Moves a worker to its own process group, so that a terminal's or batch system's signals reach the trainer only.

    The trainer may still want to finish a step; it ends its workers, and they end if it dies.
    """
    os.setpgid(0, 0)


def _unchanged(step: Any) -> Any:
    return step
