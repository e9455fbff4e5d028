"""Trains the hosts of a run, epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from esper.data.task import Task
from esper.training.execution.lanes import Env, Lanes
from esper.training.host_training import HostTraining
from esper.training.micro_batching import MicroBatchPolicy, OutOfMemoryRetry
from esper.training.streamed import shared_batches, train_in_step


class HostTrainer:
    """Trains ``hosts``, all of one task, on ``lanes``; the caller closes both.

    Hosts read data in memory independently. Streamed data is read once for all hosts by workers that live until
    :meth:`close`. A host gets the same batches in both cases.

    ``policy`` says how batches are split. Trainers of the same run share it, so that their hosts train alike; None
    makes one for this trainer.
    """

    def __init__(
        self, task: Task, hosts: Sequence[HostTraining], lanes: Lanes, policy: MicroBatchPolicy | None = None
    ) -> None:
        self.hosts = tuple(hosts)
        self.lanes = lanes
        self.policy = policy or MicroBatchPolicy(hosts[0].config)
        self.batches = shared_batches(task, self.hosts)
        """Reads streamed data; None for data in memory."""
        self._retry = OutOfMemoryRetry(self.policy, self.hosts, lanes)
        lanes.adopt(self.hosts)

    def epoch(self, active: Sequence[HostTraining]) -> None:
        """Trains the hosts in ``active`` for one epoch.

        Raises LaneError with env, epoch and batch; OutOfMemory if memory runs out and the epoch cannot be repeated; and
        SharedBatchError for data that cannot be read or used.
        """
        for attempt in self._retry.epoch(active):
            with attempt:
                if self.batches is None:
                    self.lanes.train(active)
                else:
                    train_in_step(self.batches, self.hosts, active, self.lanes)

    def repeatable(self, work: Callable[[Env], None], envs: Sequence[Env]) -> None:
        """Runs ``work``, such as a validation, for every env, and once more if memory runs out; raises as
        :meth:`epoch` does."""
        for attempt in self._retry.repeatable():
            with attempt:
                self.lanes.run(work, envs)

    def close(self) -> None:
        """Drops what lanes captured of the hosts and ends the workers; a second call does nothing."""
        self.lanes.release(self.hosts)
        if self.batches is not None:
            self.batches.close()
