"""Memory that runs out: in how many parts batches are computed, which is doubled once in a run, and what is said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from esper.config_resolved import HostTrainingConfig
from esper.telemetry.event import Event, MicroBatchHalved
from esper.training.execution.workers import LaneError

CPU_WORDS = ("can't allocate memory", "not enough memory")
"""Of torch's allocator on the CPU, which raises a plain RuntimeError."""

CUDA_WORDS = (
    "CUDA error: out of memory",
    "out of memory (CUDA error 2)",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
"""Of CUDA and its libraries where they allocate without PyTorch's allocator, as for a graph: errors of other types than
torch.OutOfMemoryError. The second is Esper's own, of a launch."""


class OutOfMemory(LaneError):
    """Memory ran out in a lane, and there are no smaller parts to try; says what takes less."""

    def __init__(self, cause: LaneError, parts: Parts) -> None:
        RuntimeError.__init__(self, f"{cause}\n{parts.advice()}")
        self.env, self.epoch, self.batch, self.causes = cause.env, cause.epoch, cause.batch, cause.causes
        self.__cause__ = cause


@dataclass(frozen=True)
class Shortage:
    """Where memory ran out first, and what was said of it."""

    env: int
    epoch: int
    batch: int
    reason: str


def ran_out(error: BaseException) -> bool:
    """Whether the error is that there is no memory left, on a GPU, for tensors on the CPU, or for anything else."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in CPU_WORDS + CUDA_WORDS)


def shortage(error: LaneError) -> Shortage | None:
    """Of an error whose causes, in every env that failed, are all of this kind; None for any other."""
    if not all(ran_out(cause) for cause in error.causes):
        return None
    said = (str(error.causes[0]).splitlines() or [type(error.causes[0]).__name__])[0]
    return Shortage(error.env, error.epoch, error.batch, said)


class Parts:
    """In how many parts the hosts of one run compute a batch.

    They are doubled once, the first time that memory runs out: a host that has less room by the hour would otherwise
    slow down without end. What is evaluated at once is halved with them.
    """

    def __init__(self, config: HostTrainingConfig) -> None:
        self.config = config
        self.count = config.task.micro_batches
        self.doubled = False
        self.tell: Callable[[Event], None] | None = None
        """Takes the event."""

    @property
    def may_double(self) -> bool:
        """Whether there is anything left to try."""
        return not self.doubled and 2 * self.count <= self.config.task.batch_size

    def double(self, found: Shortage) -> None:
        """Twice as many parts from now on, and tell so."""
        self.restore(2 * self.count)
        if self.tell is not None:
            self.tell(
                MicroBatchHalved(
                    env=found.env, epoch=found.epoch, batch=found.batch, micro_batches=self.count, reason=found.reason
                )
            )

    def restore(self, count: int) -> None:
        """``count`` parts, of a run that goes on: the config's, or twice as many. Raises ValueError for others."""
        if count not in (self.config.task.micro_batches, 2 * self.config.task.micro_batches):
            raise ValueError(f"batches in {count} parts; the config has {self.config.task.micro_batches}")
        self.count = count
        self.doubled = count != self.config.task.micro_batches

    def at_once(self, evaluated: int) -> int:
        """How many samples to evaluate at once, where it would be so many."""
        return -(-evaluated // 2) if self.doubled else evaluated

    def advice(self) -> str:
        """What a person can do."""
        task, envs = self.config.task, self.config.env.n_envs
        tried = f" though batches are computed in {self.count} parts since it did before" if self.doubled else ""
        return (
            f"Memory ran out{tried}. A new run takes less of it with more parts (--set task.micro_batches="
            f"{2 * self.count}), a smaller task.batch_size (here {task.batch_size}), or fewer hosts (env.n_envs, here "
            f"{envs})."
        )
