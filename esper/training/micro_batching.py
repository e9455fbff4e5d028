"""The number of micro-batches per batch, which doubles once per run if memory runs out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import torch

from esper.config_resolved import HostTrainingConfig
from esper.telemetry.event import Event, MicroBatchHalved
from esper.training.epoch_start import EpochStart
from esper.training.execution.lanes import LaneError, Lanes
from esper.training.host_training import HostTraining

OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "CUDA error: out of memory",
    "out of memory (CUDA error 2)",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
"""Messages of plain RuntimeErrors: two of PyTorch's CPU allocator, the others of CUDA and its libraries where they
allocate without PyTorch, as for a graph. "(CUDA error 2)" is how Esper's own launches report it."""

SHORT = 0.25
"""A GPU is short of memory if less than this fraction is free. PyTorch's cache counts as used, so what is free has
never been needed in an epoch before."""


class OutOfMemory(LaneError):
    """Memory ran out in a lane, and the work cannot be repeated in smaller micro-batches; says what needs less."""

    def __init__(self, cause: LaneError, advice: str) -> None:
        RuntimeError.__init__(self, f"{cause}\n{advice}")
        self.env, self.epoch, self.batch, self.causes = cause.env, cause.epoch, cause.batch, cause.causes
        self.__cause__ = cause


def ran_out(error: BaseException) -> bool:
    """Returns True if the error says that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


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

    It doubles only once: a host whose memory shrinks by the hour would otherwise become slower and slower. Evaluation
    batches are halved with it.

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

    def split(self, error: LaneError) -> None:
        """Doubles the number of micro-batches because of ``error``, and reports it."""
        self.restore(2 * self.count)
        if self.on_split is not None:
            reason = (str(error.causes[0]).splitlines() or [type(error.causes[0]).__name__])[0]
            self.on_split(MicroBatchHalved(error.env, error.epoch, error.batch, self.count, reason))

    def restore(self, count: int) -> None:
        """Sets the number of a resumed run: that of the config, or twice as many. Raises ValueError for any other."""
        if count not in (self.config.task.micro_batches, 2 * self.config.task.micro_batches):
            raise ValueError(f"{count} micro-batches; the config has {self.config.task.micro_batches}")
        self.count = count

    def evaluation_batch(self, samples: int) -> int:
        """Returns the size of evaluation batches, where ``samples`` is the task's."""
        return -(-samples // 2) if self.was_split else samples

    def advice(self) -> str:
        """Says how a run needs less memory."""
        task, envs = self.config.task, self.config.env.n_envs
        split = f", although batches are split into {self.count} since it ran out before" if self.was_split else ""
        return (
            f"Memory ran out{split}. A new run needs less with more micro-batches (--set task.micro_batches="
            f"{2 * self.count}), a smaller task.batch_size (here {task.batch_size}), or fewer hosts (env.n_envs, here "
            f"{envs})."
        )


class Attempt:
    """A block that may run out of memory; :attr:`failed` is True if it did and is to be repeated in smaller parts.

    Raises OutOfMemory, from the block's error, if it did and cannot be repeated.
    """

    def __init__(self, policy: MicroBatchPolicy, repeatable: bool) -> None:
        self.policy, self.repeatable = policy, repeatable
        self.failed = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, LaneError) or not all(ran_out(cause) for cause in error.causes):
            return False
        if not (self.repeatable and self.policy.can_split):
            raise OutOfMemory(error, self.policy.advice()) from error
        self.policy.split(error)
        self.failed = True
        return True


class OutOfMemoryRetry:
    """Repeats work in twice as many micro-batches if memory runs out, once per run::

        for attempt in retry.epoch(active):
            with attempt:
                ...  # train

    ``hosts`` are all hosts of a trainer, and ``policy`` is shared by the trainers of a run.
    """

    def __init__(self, policy: MicroBatchPolicy, hosts: Sequence[HostTraining], lanes: Lanes) -> None:
        self.policy, self.hosts, self.lanes = policy, hosts, lanes
        self._first_epoch = True

    def epoch(self, active: Sequence[HostTraining]) -> Iterator[Attempt]:
        """Yields the attempts at an epoch of the hosts in ``active``; a second one begins where the first began.

        The result is that of a run that split its batches further from this epoch on, bit for bit. The hosts' state is
        copied only if memory may run out (:func:`may_run_out`), since the copies take time and are rarely needed.
        """
        devices = {training.device for training in active} if self.policy.can_split else set()
        copies = any(may_run_out(device, self._first_epoch) for device in devices)
        orders = [training.order.get_state() for training in self.hosts] if copies else []  # streams draw from all
        starts: dict[int, EpochStart] = {}

        def copy(training: HostTraining) -> None:
            starts[training.index] = EpochStart(training)

        def restore(training: HostTraining) -> None:
            if training.index in starts:  # else copying failed, and the host has not trained since
                starts[training.index].restore(training)

        self._apply_policy()
        first = Attempt(self.policy, repeatable=copies)
        with first:
            if copies:
                self.lanes.run(copy, active)
        if not first.failed:
            yield first
        if first.failed:
            gc.collect()  # frees tensors that the frames of the error referred to
            for training, order in zip(self.hosts, orders, strict=True):
                training.order.set_state(order)
            self._apply_policy()
            last = Attempt(self.policy, repeatable=False)
            with last:
                self.lanes.run(restore, active)
            yield last
        self._first_epoch = False

    def repeatable(self) -> Iterator[Attempt]:
        """Yields the attempts at work that changes no host."""
        self._apply_policy()
        first = Attempt(self.policy, repeatable=True)
        yield first
        if first.failed:
            gc.collect()
            self._apply_policy()
            yield Attempt(self.policy, repeatable=False)

    def _apply_policy(self) -> None:
        """Gives the policy's sizes to all hosts; what was captured with other sizes is dropped."""
        changed = [training for training in self.hosts if training.micro_batches != self.policy.count]
        self.lanes.release(changed)
        for training in changed:
            training.micro_batches = self.policy.count
            training.evaluation_batch = self.policy.evaluation_batch(training.task.evaluation_batch)
        self.lanes.adopt(changed)
