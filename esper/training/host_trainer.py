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
from esper.training.epoch_start import EpochStart
from esper.training.execution.multi_gpu import AnyLanes, OneDevice, by_device, everywhere
from esper.training.execution.streams import StreamLanes
from esper.training.execution.workers import HasPlace, LaneError
from esper.training.host_training import HostTraining
from esper.training.micro_batching import OutOfMemory, Parts, Shortage, shortage
from esper.training.placement import HostCopy
from esper.training.seed_pool import ParameterGroup
from esper.training.step import begin_epoch, train_epoch, train_step

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
        envs: Sequence[HostTraining],
        lanes: AnyLanes,
        parts: Parts | None = None,
        pinned: Collection[HostCopy] = (),
    ) -> None:
        self.envs = tuple(envs)
        self.lanes = lanes
        self.parts = parts or Parts(self.envs[0].config)
        self._starts = {training.index: EpochStart(HostCopy.EPOCH_START in pinned) for training in self.envs}
        self._adopt(self.envs)
        self.batches: SharedBatchIterator | None = None
        if not isinstance(task.train, Split):
            config = self.envs[0].config.task
            streams = [_OrderOf(training, task.samples) for training in self.envs]
            steps = config.samples_per_epoch // config.batch_size
            expected = Expected.like(task.sample, task.validation.y, task.classes)
            self.batches = SharedBatchIterator(
                task.train, streams, config.batch_size, steps, task.workers, expected, pinned=task.device.type == "cuda"
            )

    def epoch(self, active: Sequence[HostTraining]) -> None:
        """One epoch of the hosts in ``active``.

        Raises LaneError with the env, epoch and batch of an error, OutOfMemory where there are no smaller parts to try,
        and SharedBatchError for data that cannot be read or used.
        """
        orders = [training.order.get_state() for training in self.envs]  # all are drawn from where data streams

        def again() -> None:
            for training, order in zip(self.envs, orders, strict=True):
                training.order.set_state(order)
            self.lanes.run(lambda training: self._starts[training.index].restore(training), active)
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
        for training in self.envs:
            if training.micro_batches != self.parts.count:
                training.micro_batches = self.parts.count
                training.evaluation_batch = self.parts.at_once(training.task.evaluation_batch)
                self._release([training])
                self._adopt([training])

    def _adopt(self, envs: Sequence[HostTraining]) -> None:
        for lanes, mine in by_device(self.lanes, envs):
            if isinstance(lanes, StreamLanes):
                lanes.adopt(mine)

    def _release(self, envs: Sequence[HostTraining]) -> None:
        for lanes, mine in by_device(self.lanes, envs):
            if isinstance(lanes, StreamLanes):
                lanes.release(mine)

    def _train(self, active: Sequence[HostTraining], remember: bool) -> None:
        """``remember``: how everything was before, so that it can be done again."""

        def before(training: HostTraining) -> None:
            if remember:
                self._starts[training.index].capture(training)
            else:
                self._starts[training.index].forget()  # memory that there was too little of

        def on_device(lanes: OneDevice, mine: list[HostTraining]) -> None:
            def on_lane(training: HostTraining) -> None:
                before(training)
                train_epoch(training, cancelled=lambda: lanes.cancelled)

            if isinstance(lanes, StreamLanes):
                lanes.train(mine, before)
            else:
                lanes.run(on_lane, mine)

        if self.batches is not None:
            self.lanes.run(before, active)
            self._train_in_step(self.batches, active)
        else:
            everywhere(self.lanes, active, on_device)

    def _train_in_step(self, shared: SharedBatchIterator, active: Sequence[HostTraining]) -> None:
        """Batches are read for all envs together, and each is learned from by all before the next."""
        groups: dict[int, list[ParameterGroup]] = {}

        def begin(training: HostTraining) -> None:
            groups[training.index] = begin_epoch(training)

        self.lanes.run(begin, active)
        place = {training.index: place for place, training in enumerate(self.envs)}
        number = 0
        try:
            for number, batches in enumerate(shared.epoch()):

                def learn(
                    training: HostTraining, number: int = number, batches: list[tuple[Tensor, Tensor]] = batches
                ) -> None:
                    training.batch = number
                    # Torch keeps pinned memory that is copied from until the copy is done.
                    x, y = (values.to(training.device, non_blocking=True) for values in batches[place[training.index]])
                    train_step(training, groups[training.index], x, y)

                self.lanes.run(learn, active)
        except SharedBatchError as error:
            raise self._placed(error, active) from error
        except RuntimeError as error:
            if not worker_died(error):  # which torch tells by a signal, whatever was being done
                raise
            raise self._placed(SharedBatchError(f"a worker died: {error}", batch=number), active) from error
        for training in active:
            training.epoch += 1

    def _placed(self, error: SharedBatchError, active: Sequence[HostTraining]) -> SharedBatchError:
        """The error with the env, by its own index, and the epoch that it happened in."""
        epoch = active[0].epoch if active else 0
        whose = [training.index for training in active] if error.env is None else [self.envs[error.env].index]
        envs = f"env{'s' if len(whose) > 1 else ''} {', '.join(map(str, whose))}"
        return SharedBatchError(
            f"{envs}, epoch {epoch}, batch {error.batch}: {error}",
            env=whose[0] if error.env is not None else None,
            batch=error.batch,
        )

    def held(self, training: HostTraining) -> Counter[str]:
        """Bytes of the copies of how the env's last epoch began, by where they lie: ``cpu``, ``cuda:0``, ... or
        ``pinned``."""
        start = self._starts[training.index]
        return Counter({start.place: start.bytes})

    def close(self) -> None:
        """End the workers, and drop what lanes captured of these envs; a second call does nothing."""
        self._release(self.envs)
        if self.batches is not None:
            self.batches.close()


class _OrderOf:
    """The rows of an env's next epoch, out of its own generator."""

    def __init__(self, training: HostTraining, size: int) -> None:
        self.env, self.size = training, size

    def draw(self, count: int) -> Tensor:
        return torch.randperm(self.size, generator=self.env.order)[:count]
