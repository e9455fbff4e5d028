"""Trains the hosts of a run, epoch by epoch, and repeats what runs out of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial

from esper.data.task import Task
from esper.training.copies import pinned_copy
from esper.training.executor import Executor, Placed
from esper.training.host_state import State, host_state, restore_host_state
from esper.training.host_training import HostTraining
from esper.training.micro_batching import MicroBatchPolicy
from esper.training.streamed import shared_batches, train_in_step


class HostTrainer:
    """Trains ``hosts``, all of one task, on ``executor``; the caller closes both.

    Hosts read data in memory independently. Streamed data is read once for all hosts by workers that live until
    :meth:`close`. A host gets the same batches in both cases.

    ``policy`` says how batches are split. Trainers of the same run share it, so that their hosts train alike; None
    makes one for this trainer.
    """

    def __init__(
        self,
        task: Task,
        hosts: Sequence[HostTraining],
        executor: Executor,
        policy: MicroBatchPolicy | None = None,
    ) -> None:
        self.hosts = tuple(hosts)
        self.executor = executor
        self.policy = policy or MicroBatchPolicy(hosts[0].config)
        self.batches = shared_batches(task, self.hosts)
        """Reads streamed data; None for data in memory."""
        self._train = executor.train
        if self.batches is not None:
            self._train = partial(train_in_step, self.batches, self.hosts, executor)
        self._first_epoch = True
        executor.adopt(self.hosts)

    def epoch(self, active: Sequence[HostTraining]) -> None:
        """Trains the hosts in ``active`` for one epoch.

        If memory runs out, the epoch is repeated from its start, and the result is bit for bit that of a run that split
        its batches further from this epoch on. The state at its start is copied only if memory may run out, since the
        copies take time and are rarely needed.

        Raises HostError with env, epoch and batch; OutOfMemory if memory runs out and the epoch cannot be repeated; and
        SharedBatchError for data that cannot be read or used.
        """
        copies = self.policy.needs_start({training.device for training in active}, self._first_epoch)
        # Of all hosts, because streamed data draws from the generators of those that are not active, too.
        orders = [training.order.get_state() for training in self.hosts] if copies else []
        starts: dict[int, State] = {}

        def save(training: HostTraining) -> None:
            starts[training.index] = host_state(training, pinned_copy)

        def restore(training: HostTraining) -> None:
            if training.index in starts:  # else copying failed, and the host has not trained since
                restore_host_state(training, starts[training.index])

        self._apply_policy()
        with self.policy.splitting(repeatable=copies):
            if copies:
                self.executor.run(save, active)
            self._train(active)

        # Once more, if memory ran out and batches were split.
        if self._apply_policy():
            for training, order in zip(self.hosts, orders, strict=True):
                training.order.set_state(order)
            with self.policy.splitting(repeatable=False):
                self.executor.run(restore, active)
                self._train(active)
        self._first_epoch = False

    def repeatable(self, work: Callable[[Placed], None], hosts: Sequence[Placed]) -> None:
        """Runs ``work`` that changes no host, such as a validation, for every host; once more if memory runs out.

        Raises the errors of :meth:`epoch`.
        """
        self._apply_policy()
        with self.policy.splitting(repeatable=True):
            self.executor.run(work, hosts)
        if self._apply_policy():
            with self.policy.splitting(repeatable=False):
                self.executor.run(work, hosts)

    def _apply_policy(self) -> bool:
        """Gives hosts the policy's sizes and drops work that was captured with others; returns True if any changed."""
        changed = [training for training in self.hosts if training.micro_batches != self.policy.count]
        if not changed:
            return False
        gc.collect()  # frees tensors that the frames of an error referred to
        self.executor.release(changed)
        for training in changed:
            training.micro_batches = self.policy.count
            training.evaluation_batch = self.policy.evaluation_batch(training.task.evaluation_batch)
        self.executor.adopt(changed)
        return True

    def close(self) -> None:
        """Drops what was captured of the hosts and ends the workers; a second call does nothing."""
        self.executor.release(self.hosts)
        if self.batches is not None:
            self.batches.close()
