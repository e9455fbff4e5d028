"""Batches for many envs from one data set that does not fit in memory.

One loader with persistent workers serves all envs. At every step it reads one batch per env, all of equal size, with
rows in the order of the env's own generator, so an env's batches depend neither on the number of workers nor on other
envs. Random draws in rows (augmentation) are reproducible, too: the global generators are seeded for every batch from
the rows of its epoch and its place in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from esper.data.rng import drawing_from, epoch_seed
from esper.data.split import Batch, BatchReader, stack_samples, unusable_sample
from esper.hosts.inputs import Inputs, form_of
from esper.telemetry.span import Spans

Request = tuple[int, NDArray[np.int64]]
"""A batch to read: the seed of its random draws, and its rows [batch_size]."""


class SharedBatchError(RuntimeError):
    """Raised for a step without a batch of the right size for every env, or for data that cannot be read or used.

    ``env`` is the env of the batch, or None if all are affected; ``batch`` is the number of the step in its epoch.
    """

    def __init__(self, message: str, env: int | None = None, batch: int | None = None) -> None:
        super().__init__(message)
        self.env = env
        self.batch = batch


def worker_died(error: BaseException) -> bool:
    """True for the error that torch raises, anywhere in the main thread, when a loader's worker dies."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker")


class Expected:
    """The shapes, dtype and classes that a network was made for; every batch must match them.

    Shapes and dtypes are those of inputs x [n, ...] and targets y [n, ...]. ``classes`` is the number of classes, or
    None if targets are not classes.
    """

    def __init__(self, x: Inputs, y: Tensor, classes: int | None) -> None:
        self.form = _form(x, y)
        """The shapes and dtypes in words."""
        self.classes = classes

    def fault(self, x: Inputs, y: Tensor) -> tuple[int, str] | None:
        """Returns the index of the first invalid sample of a batch and the reason; None if all are valid."""
        form = _form(x, y)
        if form != self.form:
            return 0, f"{form}; expected {self.form}"
        return unusable_sample(x, y, self.classes)


def _form(x: Inputs, y: Tensor) -> str:
    return f"inputs {form_of(x, of_sample=True)} and targets {form_of(y, of_sample=True)}"


class SharedBatchIterator:
    """Epochs of ``steps`` batches for every env.

    Args:
        dataset: map-style, rows (x, y) of equal shapes.
        generators: one per env, which draws the order of the env's rows: a new permutation every epoch.
        batch_size: rows per batch of one env.
        steps: batches per epoch, for which the data has enough rows.
        workers: number of reader processes, which live until :meth:`close`; 0 reads in this process.
        expected: shapes and dtype that batches must have; None does not check them.
        pinned: whether batches lie in page-locked memory, from which a GPU copies without blocking the CPU.
    """

    def __init__(
        self,
        dataset: Dataset[Batch],
        generators: Sequence[torch.Generator],
        batch_size: int,
        steps: int,
        workers: int = 0,
        expected: Expected | None = None,
        pinned: bool = False,
    ) -> None:
        self.generators = tuple(generators)
        self.rows = len(dataset)  # type: ignore[arg-type]
        self.batch_size = batch_size
        self.steps = steps
        self.spans = Spans()
        """Records the time spent waiting for data, as ``stage``; an env replaces it with its own."""
        self._plan: list[list[Request]] = []
        """The batches of all envs at each step of the current epoch; drawn at once, however far ahead workers read."""
        self._loader: DataLoader[_Step] | None = DataLoader(
            _Steps(dataset, expected),
            sampler=self._plan,
            batch_size=None,  # the loader's item is a whole step, assembled in a worker
            worker_init_fn=_leave_group,
            num_workers=workers,
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # its own, since a loader draws a seed for its workers every epoch
            pin_memory=pinned,  # by a thread of this process, see _Step.pin_memory
        )
        self._epoch = 0
        self._reading: Iterator[_Step] | None = None

    def epoch(self) -> Iterator[list[Batch]]:
        """Yields ``steps`` lists with one (x, y) per env.

        Starting an epoch ends an unfinished earlier one. Raises SharedBatchError if rows cannot be read, if a worker
        has died, or if a newer epoch or :meth:`close` has ended this one.
        """
        if self._loader is None:
            raise SharedBatchError("the batches are closed")
        self._epoch += 1
        drawn = [self._draw(env) for env in range(len(self.generators))]
        self._plan.clear()
        for step in range(self.steps):
            self._plan.append([(seed + step, rows[step]) for seed, rows in drawn])
        self._reading = iter(self._loader)
        return self._steps_of(self._epoch)

    def _draw(self, env: int) -> Request:
        """Draws the epoch of an env: a seed for its random draws, and its rows [steps, batch_size]."""
        order = torch.randperm(self.rows, generator=self.generators[env])
        rows = order[: self.steps * self.batch_size]
        return epoch_seed(rows), rows.view(self.steps, self.batch_size).numpy()

    def _steps_of(self, epoch: int) -> Iterator[list[Batch]]:
        for step in range(self.steps):
            if epoch != self._epoch or self._reading is None:
                raise SharedBatchError("this epoch is over: a newer one has begun, or the batches were closed")
            try:
                with self.spans("stage"):
                    read = next(self._reading)
            except (RuntimeError, EOFError, OSError) as error:  # a killed worker shows up as one of these
                raise SharedBatchError(
                    f"reading step {step} of {self.steps}: a worker died: {error or type(error).__name__}", batch=step
                ) from error
            yield self._checked(step, read)

    def _checked(self, step: int, read: _Step) -> list[Batch]:
        if read.failure is not None:
            raise SharedBatchError(f"reading step {step} of {self.steps}, {read.failure}", read.env, step)
        for env, (x, y) in enumerate(read.batches):
            if not len(x) == len(y) == self.batch_size:
                raise SharedBatchError(
                    f"step {step}: env {env} has {len(x)} inputs and {len(y)} targets, not {self.batch_size} of each",
                    env,
                    step,
                )
        return read.batches

    def close(self) -> None:
        """Ends the workers; a second call does nothing."""
        # A loader ends its workers only when nothing refers to it or its iterator any more.
        self._reading = None
        self._loader = None


@dataclass(frozen=True)
class _Step:
    """A worker's result for one step: the batches of all envs, or the reason of a failure."""

    batches: list[Batch]
    failure: str | None = None
    env: int | None = None
    """The env whose batch failed."""

    def pin_memory(self) -> _Step:
        """Copies the batches to page-locked memory; the loader calls this method by name."""
        return replace(self, batches=[(x.pin_memory(), y.pin_memory()) for x, y in self.batches])


class _Steps(Dataset["_Step"]):
    """Reads all batches of one step. A failure is sent as a message, since not every exception can be pickled."""

    def __init__(self, dataset: Dataset[Batch], expected: Expected | None) -> None:
        self.dataset = dataset
        self.expected = expected

    def __getitem__(self, requests: list[Request]) -> _Step:
        batches: list[Batch] = []
        for env, (seed, rows) in enumerate(requests):
            samples: list[Batch] = []
            try:
                if isinstance(self.dataset, BatchReader):
                    x, y = self.dataset.batch(rows.tolist())
                else:
                    with drawing_from(seed):
                        samples.extend(self.dataset[row] for row in rows.tolist())  # keeps those before an error
                    x, y = stack_samples(samples)
                if self.expected is not None and (fault := self.expected.fault(x, y)):
                    return _Step([], f"env {env}, row {rows[fault[0]]}: {fault[1]}", env)
            except Exception as error:
                where = "putting rows together"
                if len(samples) < len(rows):
                    where = f"row {rows[len(samples)]}"
                return _Step([], f"env {env}, {where}: {type(error).__name__}: {error}", env)
            batches.append((x, y))
        return _Step(batches)


def _leave_group(_worker: int) -> None:
    """Moves a worker to its own process group, so that a terminal's or batch system's signals reach the trainer only.

    The trainer may still want to finish a step; it ends its workers, and they end if it dies.
    """
    os.setpgid(0, 0)
