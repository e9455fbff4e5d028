"""An epoch of many hosts: each by itself on its lane, or in step where the data is not in memory."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from esper.data.shared_batches import Expected, SharedBatchError, SharedBatchIterator, worker_died
from esper.data.task import Split, Task
from esper.training.device_lanes import AnyLanes, OneDevice, by_device, everywhere
from esper.training.env_state import ParallelEnvState
from esper.training.epoch_start import EpochStart
from esper.training.gpu_lanes import GpuLanes
from esper.training.host_step import begin_epoch, train_epoch, train_step
from esper.training.lanes import HasPlace, LaneError
from esper.training.memory import OutOfMemory, Parts, Shortage, shortage
from esper.training.placement import HostCopy
from esper.training.storage import ParameterGroup

Env = TypeVar("Env", bound=HasPlace)


class HostTrainer:
    """Trains the hosts of ``envs``, all of one task, on ``lanes``.

    Data in memory is every env's own to read. Data that streams is read once for all envs, in step, by workers that
    live until :meth:`close`; what an env gets is the same in both cases.

    Where memory runs out, batches are computed in twice as many ``parts`` from then on, once in a run, and what was
    under way is done again from its beginning, by all hosts: as if it had been so from that epoch on. ``parts`` is
    shared by trainers whose hosts train alike; None is this trainer's own. ``pinned`` are the copies that lie in pinned
    CPU memory where hosts are on a GPU.
    """

    def __init__(
        self,
        task: Task,
        envs: Sequence[ParallelEnvState],
        lanes: AnyLanes,
        parts: Parts | None = None,
        pinned: Collection[HostCopy] = (),
    ) -> None:
        self.envs = tuple(envs)
        self.lanes = lanes
        self.parts = parts or Parts(self.envs[0].config)
        self._starts = {env.index: EpochStart(HostCopy.EPOCH_START in pinned) for env in self.envs}
        self._adopt(self.envs)
        self.batches: SharedBatchIterator | None = None
        if not isinstance(task.train, Split):
            config = self.envs[0].config.task
            assert config.samples_per_epoch is not None
            assert config.batch_size is not None
            streams = [_OrderOf(env, task.samples) for env in self.envs]
            steps = config.samples_per_epoch // config.batch_size
            expected = Expected.like(task.sample, task.validation.y, task.classes)
            self.batches = SharedBatchIterator(
                task.train, streams, config.batch_size, steps, task.workers, expected, pinned=task.device.type == "cuda"
            )

    def epoch(self, active: Sequence[ParallelEnvState]) -> None:
        """One epoch of the hosts in ``active``.

        Raises LaneError with the env, epoch and batch of an error, OutOfMemory where there are no smaller parts to try,
        and SharedBatchError for data that cannot be read or used.
        """
        orders = [env.order.get_state() for env in self.envs]  # all are drawn from where data streams

        def again() -> None:
            for env, order in zip(self.envs, orders, strict=True):
                env.order.set_state(order)
            self.lanes.run(lambda env: self._starts[env.index].restore(env), active)
            self._train(active, remember=False)

        self._attempt(lambda: self._train(active, remember=self.parts.may_double), again)

    def repeatable(self, work: Callable[[Env], None], envs: Sequence[Env]) -> None:
        """Do ``work`` for every env on its lane, such as a validation, which may be done twice. Raises as :meth:`epoch`
        does."""
        self._attempt(lambda: self.lanes.run(work, envs), lambda: self.lanes.run(work, envs))

    def _attempt(self, do: Callable[[], None], again: Callable[[], None]) -> None:
        """``do``, and where memory runs out ``again``, in smaller parts."""
        found = self._try(do)
        if found is not None:
            gc.collect()  # what the error's frames held, which is what there was no room for
            self.parts.double(found)
            self._try(again)

    def _try(self, do: Callable[[], None]) -> Shortage | None:
        """Where memory ran out, if that can be helped. Nothing here holds the error when it returns."""
        self._cut_alike()
        try:
            do()
        except LaneError as error:
            found = shortage(error)
            if found is None:
                raise
            if not self.parts.may_double:
                raise OutOfMemory(error, self.parts) from error
            return found
        return None

    def _cut_alike(self) -> None:
        """Every host computes batches in as many parts as the run does now; what was captured of others is dropped."""
        for env in self.envs:
            if env.micro_batches != self.parts.count:
                env.micro_batches = self.parts.count
                env.evaluation_batch = self.parts.at_once(env.task.evaluation_batch)
                self._release([env])
                self._adopt([env])

    def _adopt(self, envs: Sequence[ParallelEnvState]) -> None:
        for lanes, mine in by_device(self.lanes, envs):
            if isinstance(lanes, GpuLanes):
                lanes.adopt(mine)

    def _release(self, envs: Sequence[ParallelEnvState]) -> None:
        for lanes, mine in by_device(self.lanes, envs):
            if isinstance(lanes, GpuLanes):
                lanes.release(mine)

    def _train(self, active: Sequence[ParallelEnvState], remember: bool) -> None:
        """``remember``: how everything was before, so that it can be done again."""

        def before(env: ParallelEnvState) -> None:
            if remember:
                self._starts[env.index].capture(env)
            else:
                self._starts[env.index].forget()  # memory that there was too little of

        def on_device(lanes: OneDevice, mine: list[ParallelEnvState]) -> None:
            def on_lane(env: ParallelEnvState) -> None:
                before(env)
                train_epoch(env, cancelled=lambda: lanes.cancelled)

            if isinstance(lanes, GpuLanes):
                lanes.train(mine, before)
            else:
                lanes.run(on_lane, mine)

        if self.batches is not None:
            self.lanes.run(before, active)
            self._train_in_step(self.batches, active)
        else:
            everywhere(self.lanes, active, on_device)

    def _train_in_step(self, shared: SharedBatchIterator, active: Sequence[ParallelEnvState]) -> None:
        """Batches are read for all envs together, and each is learned from by all before the next."""
        groups: dict[int, list[ParameterGroup]] = {}

        def begin(env: ParallelEnvState) -> None:
            groups[env.index] = begin_epoch(env)

        self.lanes.run(begin, active)
        place = {env.index: place for place, env in enumerate(self.envs)}
        number = 0
        try:
            for number, batches in enumerate(shared.epoch()):

                def learn(
                    env: ParallelEnvState, number: int = number, batches: list[tuple[Tensor, Tensor]] = batches
                ) -> None:
                    env.batch = number
                    # Torch keeps pinned memory that is copied from until the copy is done.
                    x, y = (values.to(env.device, non_blocking=True) for values in batches[place[env.index]])
                    train_step(env, groups[env.index], x, y)

                self.lanes.run(learn, active)
        except SharedBatchError as error:
            raise self._placed(error, active) from error
        except RuntimeError as error:
            if not worker_died(error):  # which torch tells by a signal, whatever was being done
                raise
            raise self._placed(SharedBatchError(f"a worker died: {error}", batch=number), active) from error
        for env in active:
            env.epoch += 1

    def _placed(self, error: SharedBatchError, active: Sequence[ParallelEnvState]) -> SharedBatchError:
        """The error with the env, by its own index, and the epoch that it happened in."""
        epoch = active[0].epoch if active else 0
        whose = [env.index for env in active] if error.env is None else [self.envs[error.env].index]
        envs = f"env{'s' if len(whose) > 1 else ''} {', '.join(map(str, whose))}"
        return SharedBatchError(
            f"{envs}, epoch {epoch}, batch {error.batch}: {error}",
            env=whose[0] if error.env is not None else None,
            batch=error.batch,
        )

    def held(self, env: ParallelEnvState) -> Counter[str]:
        """Bytes of the copies of how the env's last epoch began, by where they lie: ``cpu``, ``cuda:0``, ... or
        ``pinned``."""
        start = self._starts[env.index]
        return Counter({start.place: start.bytes})

    def close(self) -> None:
        """End the workers, and drop what lanes captured of these envs; a second call does nothing."""
        self._release(self.envs)
        if self.batches is not None:
            self.batches.close()


class _OrderOf:
    """The rows of an env's next epoch, out of its own generator."""

    def __init__(self, env: ParallelEnvState, size: int) -> None:
        self.env, self.size = env, size

    def draw(self, count: int) -> Tensor:
        return torch.randperm(self.size, generator=self.env.order)[:count]
