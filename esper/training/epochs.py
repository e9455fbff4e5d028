"""An epoch of many hosts: each by itself on its lane, or in step where the data is not in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from esper.data.shared_batches import SharedBatchIterator
from esper.data.task import Split, Task
from esper.training.env_state import ParallelEnvState
from esper.training.gpu_lanes import GpuLanes
from esper.training.host_step import begin_epoch, train_epoch, train_step
from esper.training.lanes import Lanes
from esper.training.storage import ParameterGroup


class HostTrainer:
    """Trains the hosts of ``envs``, all of one task, on ``lanes``.

    Data in memory is every env's own to read. Data that streams is read once for all envs, in step, by workers that
    live until :meth:`close`; what an env gets is the same in both cases.
    """

    def __init__(self, task: Task, envs: Sequence[ParallelEnvState], lanes: Lanes | GpuLanes) -> None:
        self.envs = tuple(envs)
        self.lanes = lanes
        if isinstance(lanes, GpuLanes):
            lanes.adopt(self.envs)
        self.batches: SharedBatchIterator | None = None
        if not isinstance(task.train, Split):
            config = self.envs[0].config.task
            assert config.samples_per_epoch is not None
            assert config.batch_size is not None
            streams = [_OrderOf(env, task.samples) for env in self.envs]
            steps = config.samples_per_epoch // config.batch_size
            self.batches = SharedBatchIterator(task.train, streams, config.batch_size, steps, task.workers)

    def epoch(self, active: Sequence[ParallelEnvState]) -> None:
        """One epoch of the hosts in ``active``. Raises LaneError with the env, epoch and batch of an error."""
        if self.batches is None:
            if isinstance(self.lanes, GpuLanes):
                self.lanes.train(active)
            else:
                self.lanes.run(partial(train_epoch, cancelled=lambda: self.lanes.cancelled), active)
            return
        groups: dict[int, list[ParameterGroup]] = {}

        def begin(env: ParallelEnvState) -> None:
            groups[env.index] = begin_epoch(env)

        self.lanes.run(begin, active)
        place = {env.index: place for place, env in enumerate(self.envs)}
        for number, batches in enumerate(self.batches.epoch()):

            def learn(
                env: ParallelEnvState, number: int = number, batches: list[tuple[Tensor, Tensor]] = batches
            ) -> None:
                env.batch = number
                # Memory that is not pinned CUDA has taken over when the call returns.
                x, y = (values.to(env.device, non_blocking=True) for values in batches[place[env.index]])
                train_step(env, groups[env.index], x, y)

            self.lanes.run(learn, active)
        for env in active:
            env.epoch += 1

    def close(self) -> None:
        """End the workers, and drop what lanes captured of these envs; a second call does nothing."""
        if isinstance(self.lanes, GpuLanes):
            self.lanes.release(self.envs)
        if self.batches is not None:
            self.batches.close()


class _OrderOf:
    """The rows of an env's next epoch, out of its own generator."""

    def __init__(self, env: ParallelEnvState, size: int) -> None:
        self.env, self.size = env, size

    def draw(self, count: int) -> Tensor:
        return torch.randperm(self.size, generator=self.env.order)[:count]
