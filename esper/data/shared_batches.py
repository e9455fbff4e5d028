"""Batches for many envs out of one set of data that does not fit in memory.

One loader with lasting workers serves all envs. At every step it reads one batch for each env, of equal size, each with
rows from the env's own stream of indices: what an env gets depends neither on the number of workers nor on the others.
That holds for what rows draw at random, too: the generators of a process start anew for every batch, from the rows of
its epoch and its place in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from esper.data.draws import drawing_from, epoch_seed
from esper.data.task import PAD
from esper.telemetry.span import Spans

Batch = tuple[Tensor, Tensor]
"""Inputs [batch_size, ...] and targets [batch_size, ...]."""


class SharedBatchError(RuntimeError):
    """A step that is not one batch of the agreed size for every env, or data that could not be read or used.

    ``env`` is whose batch it was, None where it is about all of them; ``batch`` the number of the step in its epoch.
    """

    def __init__(self, message: str, env: int | None = None, batch: int | None = None) -> None:
        super().__init__(message)
        self.env, self.batch = env, batch


def worker_died(error: BaseException) -> bool:
    """Whether this is what torch raises, in the main thread and wherever that is, when a worker of a loader ends."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")


@dataclass(frozen=True)
class Expected:
    """What a network was made for, which every batch that is read has to be."""

    inputs: tuple[int, ...]
    """Shape of one."""
    dtype: torch.dtype
    targets: tuple[int, ...]
    classes: int

    @classmethod
    def like(cls, x: Tensor, y: Tensor, classes: int) -> Expected:
        """As inputs x [n, ...] and targets y [n, ...]."""
        return cls(tuple(x.shape[1:]), x.dtype, tuple(y.shape[1:]), classes)

    def fault(self, x: Tensor, y: Tensor) -> tuple[int, str] | None:
        """The place of the first sample of the batch that cannot be learned from, and why; None for none."""
        found = (tuple(x.shape[1:]), x.dtype, tuple(y.shape[1:]), y.dtype)
        wanted = (self.inputs, self.dtype, self.targets, torch.int64)
        if found != wanted:
            told = [f"inputs {s[1]} of shape {s[0]} and targets {s[3]} of shape {s[2]}" for s in (found, wanted)]
            return 0, f"{told[0]}; wanted {told[1]}"
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
    """Whose rows an env sees, epoch after epoch."""

    def draw(self, count: int) -> Tensor:
        """The rows of the env's next epoch, int64 [count]."""


class Permutations:
    """A new permutation of ``size`` rows every epoch, out of a generator that is the env's own."""

    def __init__(self, size: int, generator: torch.Generator) -> None:
        self.size, self.generator = size, generator

    def draw(self, count: int) -> Tensor:
        return torch.randperm(self.size, generator=self.generator)[:count]


class SharedBatchIterator:
    """Epochs of ``steps`` batches for every env.

    Args:
        dataset: map-style, rows (x, y) of equal shapes.
        streams: one index stream an env.
        batch_size: rows in one batch of one env.
        steps: batches an epoch.
        workers: processes that read; 0 reads in this one. They live until :meth:`close`.
        expected: what batches have to be; None takes them as they are.
        pinned: whether batches lie in page-locked memory, which a GPU copies from while the CPU goes on.

    Raises ValueError for no env, for numbers below 1, and where an epoch takes more rows than there are.
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
        """Processes that have read for the newest epoch."""
        self.spans = Spans()
        """Told how long epochs waited for data, as ``stage``; an env that reads puts its own here."""
        self._plan = _Plan(self.streams, rows, batch_size, steps)
        self._loader: DataLoader[_Step] | None = DataLoader(
            _Steps(dataset, expected),
            sampler=self._plan,
            batch_size=None,  # a step is what the loader takes for one item: it is made whole in a worker
            collate_fn=_unchanged,
            worker_init_fn=_apart,
            num_workers=workers,
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # of its own: a loader draws a seed for its workers every epoch
            pin_memory=pinned,  # by a thread of this process, see _Step.pin_memory
        )
        self._epoch = 0
        self._reading: Iterator[_Step] | None = None

    def epoch(self) -> Iterator[list[Batch]]:
        """``steps`` lists with one (x, y) an env.

        An epoch that is not read to its end is over when the next one begins. Raises SharedBatchError for a stream that
        gives other rows than asked for, rows that cannot be read, and a worker that has died.
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
            except (RuntimeError, EOFError, OSError) as error:  # a killed worker is noticed in one of these ways
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
        """End the workers; a second call does nothing."""
        # A loader ends its workers when nothing refers to it and to its iterator any more; it has no other way.
        self._reading = None
        self._loader = None

    def __enter__(self) -> SharedBatchIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Step:
    """What a worker sends: the batches of all envs, or why there are none."""

    pid: int
    batches: list[Batch]
    failure: str | None = None
    env: int | None = None
    """Whose batch failed."""

    def pin_memory(self) -> _Step:
        """The same in page-locked memory; the loader calls it by this name."""
        return replace(self, batches=[(x.pin_memory(), y.pin_memory()) for x, y in self.batches])


Ask = tuple[int, list[int]]
"""A batch that is to be read: what its rows draw from at random, and the rows."""


class _Plan(Sampler[list[Ask]]):
    """Which rows each env gets at each step; the whole epoch is drawn at once, however far ahead workers read."""

    def __init__(self, streams: tuple[IndexStream, ...], rows: int, batch_size: int, steps: int) -> None:
        self.streams, self.rows, self.batch_size, self.steps = streams, rows, batch_size, steps
        self.drawn: list[tuple[int, Tensor]] = []
        """For each env, what its epoch's rows draw from, and the rows [steps, batch_size]."""

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
    """Reads all batches of one step. A failure is sent as a message, since not every exception can be sent."""

    def __init__(self, dataset: Dataset[Batch], expected: Expected | None) -> None:
        self.dataset, self.expected = dataset, expected

    def __getitem__(self, asked: list[Ask]) -> _Step:
        batches: list[Batch] = []
        for env, (seed, mine) in enumerate(asked):
            row = mine[0]
            try:
                pairs: list[Any] = []
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
    """Signals to the group of the process that trains, of a terminal or a batch system, are for that one to answer: it
    may still want to end a step. A worker is ended by it, or ends when it is gone."""
    os.setpgid(0, 0)


def _unchanged(step: Any) -> Any:
    return step
