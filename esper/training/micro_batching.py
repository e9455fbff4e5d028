"""The number of micro-batches per batch, which doubles once per run if memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from esper.config.resolved import HostTrainingConfig
from esper.telemetry.event import Event, MicroBatchHalved
from esper.training.executor import HostError

OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "out of memory (CUDA error 2)",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
"""Messages of plain RuntimeErrors: two of PyTorch's CPU allocator, the others of CUDA and its libraries if they
allocate without PyTorch, as for a graph. "(CUDA error 2)" is how Esper's own launches report it."""

SHORT = 0.25
"""A GPU is short of memory if less than this fraction is free. PyTorch's cache counts as used, so what is free has
never been needed in an epoch before."""


class OutOfMemory(HostError):
    """Memory ran out for a host, and its work cannot be repeated in smaller micro-batches; says what needs less."""

    def __init__(self, cause: HostError, advice: str) -> None:
        RuntimeError.__init__(self, f"{cause}\n{advice}")
        self.env = cause.env
        self.epoch = cause.epoch
        self.batch = cause.batch
        self.causes = cause.causes
        self.__cause__ = cause


def ran_out(error: BaseException) -> bool:
    """Returns True if the error says that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return any(words in str(error) for words in OUT_OF_MEMORY)


def may_run_out(device: torch.device, first_epoch: bool) -> bool:
    """Returns True if an epoch may need more memory than ``device`` has, as far as that can be known.

    On a GPU that is the first epoch, whose needs are unknown, and any epoch while the GPU is short of memory. On a CPU
    the answer is always False: Linux usually ends a process that runs out instead of refusing memory.
    """
    if device.type != "cuda":
        return False
    if first_epoch:
        return True
    with torch.cuda.device(device):
        free, total = torch.cuda.mem_get_info(device)
    return free < SHORT * total


class MicroBatchPolicy:
    """The number of micro-batches per batch, for all hosts of a run.

    It doubles at most once: a host whose memory shrinks by the hour would otherwise become slower and slower.
    Evaluation batches are halved with it.

    Args:
        config: with the task's sizes in place of None.
    """

    def __init__(self, config: HostTrainingConfig) -> None:
        self.config = config
        self.count = config.task.micro_batches
        """Micro-batches per batch."""
        self.on_split: Callable[[Event], None] | None = None
        """Receives the event of a split."""

    @property
    def was_split(self) -> bool:
        """True if memory has run out before."""
        return self.count != self.config.task.micro_batches

    @property
    def can_split(self) -> bool:
        """True if batches can be split once more."""
        return not self.was_split and 2 * self.count <= self.config.task.batch_size

    def needs_start(self, devices: Iterable[torch.device], first_epoch: bool) -> bool:
        """Returns True if an epoch may have to be repeated, which needs a copy of the state before it."""
        return self.can_split and any(may_run_out(device, first_epoch) for device in devices)

    @contextmanager
    def splitting(self, repeatable: bool) -> Iterator[None]:
        """Splits batches if memory runs out in the block, which the caller then repeats.

        Raises OutOfMemory instead if the work is not ``repeatable`` or batches cannot be split.
        """
        try:
            yield
        except HostError as error:
            if not all(map(ran_out, error.causes)):
                raise
            if not (repeatable and self.can_split):
                raise OutOfMemory(error, self.advice()) from error
            self.restore(2 * self.count)
            self._report(error)

    def _report(self, error: HostError) -> None:
        """Tells of the split after an error, with the first line of its message, or its type if there is none."""
        if self.on_split is None:
            return
        cause = error.causes[0]
        lines = str(cause).splitlines() or [type(cause).__name__]
        self.on_split(
            MicroBatchHalved(
                error.env,
                error.epoch,
                error.batch,
                self.count,
                lines[0],
            )
        )

    def restore(self, count: int) -> None:
        """Sets the number of a resumed run: that of the config, or twice as many. Raises ValueError for any other."""
        configured = self.config.task.micro_batches
        if count not in (configured, 2 * configured):
            raise ValueError(f"{count} micro-batches; the config has {configured}")
        self.count = count

    def evaluation_batch(self, samples: int) -> int:
        """Returns the size of evaluation batches for a task that evaluates ``samples`` at once."""
        if not self.was_split:
            return samples
        return -(-samples // 2)  # rounded up

    def advice(self) -> str:
        """A sentence on how a run needs less memory."""
        split = ""
        if self.was_split:
            split = f", although batches are split into {self.count} since it ran out before"
        return (
            f"Memory ran out{split}. A new run needs less with more micro-batches (--set task.micro_batches="
            f"{2 * self.count}), a smaller task.batch_size (here {self.config.task.batch_size}), or fewer hosts "
            f"(env.n_envs, here {self.config.env.n_envs})."
        )
