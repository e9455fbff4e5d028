"""Trains the hosts of a run, epoch by epoch, on data in memory or on streamed data.

Hosts read data in memory independently. Streamed data is read once for all hosts: each batch is read, and all hosts
learn from it before the next one is read. A host gets the same batches in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from esper.config.resolved import HostTrainingConfig
from esper.data.shared_batches import Expected, SharedBatchError, SharedBatchIterator, worker_died
from esper.data.split import Batch, Split
from esper.data.task import Task
from esper.training.counterfactual import max_configurations
from esper.training.executor import Executor, HostError, OutOfMemory, Placed, ran_out
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.rng import seeded
from esper.training.seed_pool import ParameterGroup
from esper.training.step import prepare_epoch, train_step


def device_index(index: int, devices: int) -> int:
    """Returns the number of the device of env ``index``: round-robin."""
    return index % devices


def make_trainings(
    tasks: Sequence[Task],
    configs: Sequence[HostTrainingConfig],
    indices: Sequence[int],
    devices: int = 1,
) -> list[HostTraining]:
    """Makes one host for each task, config and index; those of one device share one block of totals.

    ``devices`` is the number of devices that the tasks lie on, in turn.
    """
    with seeded(0):  # a host to count its sites
        sites = len(tasks[0].new_host(configs[0].env.slots).sites)
    places = [device_index(index, devices) for index in indices]
    blocks = {}
    for place, task in dict(zip(places, tasks, strict=True)).items():
        blocks[place] = make_metrics(
            places.count(place),
            task.device,
            max_configurations(sites),
            len(task.validation),
            task.objective.dtype,
        )

    trainings = []
    for index, task, config, place in zip(indices, tasks, configs, places, strict=True):
        totals = blocks[place].pop(0)  # the next row
        trainings.append(HostTraining(index, task, config, totals))
    return trainings


class HostTrainer:
    """Trains ``hosts``, of one task or each of its own in memory, on ``executor``; the caller closes both.

    Workers that read streamed data live until :meth:`close`.
    """

    def __init__(
        self,
        task: Task,
        hosts: Sequence[HostTraining],
        executor: Executor,
    ) -> None:
        self.hosts = tuple(hosts)
        self.executor = executor
        self.batches = shared_batches(task, self.hosts)
        """Reads streamed data; None for data in memory."""
        self._train = executor.train
        if self.batches is not None:
            self._train = partial(
                train_in_step,
                self.batches,
                self.hosts,
                executor,
            )
        executor.adopt(self.hosts)

    def replace(self, place: int, training: HostTraining) -> None:
        """Trains another host, on data in memory, in the place of one."""
        hosts = list(self.hosts)
        self.executor.release([hosts[place]])
        hosts[place] = training
        self.hosts = tuple(hosts)
        self.executor.adopt([training])

    def epoch(
        self,
        active: Sequence[HostTraining],
        then: Callable[[HostTraining], None] | None = None,
    ) -> None:
        """Trains the hosts in ``active`` for one epoch, and calls ``then`` for each as ``Executor.train`` does.

        Raises HostError with env, epoch and batch; OutOfMemory if memory runs out; and SharedBatchError for data that
        cannot be read or used.
        """
        with self._explaining_memory():
            self._train(active, then)

    def run(
        self,
        work: Callable[[Placed], None],
        hosts: Sequence[Placed],
    ) -> None:
        """Runs ``work``, such as a validation, for every host. Raises HostError, or OutOfMemory."""
        with self._explaining_memory():
            self.executor.run(work, hosts)

    @contextmanager
    def _explaining_memory(self) -> Iterator[None]:
        """Raises OutOfMemory for an error in the block that says nothing else."""
        try:
            yield
        except HostError as error:
            if all(map(ran_out, error.causes)):
                raise OutOfMemory(error, self.hosts[0].config) from error
            raise

    def close(self) -> None:
        """Drops what was captured of the hosts and ends the workers; a second call does nothing."""
        self.executor.release(self.hosts)
        if self.batches is not None:
            self.batches.close()


def shared_batches(task: Task, hosts: Sequence[HostTraining]) -> SharedBatchIterator | None:
    """Starts the workers that read the data of ``task`` for ``hosts``; None if the data is in memory.

    A host gets the same rows in the same order as it would from memory. The caller closes the iterator.
    """
    if isinstance(task.train, Split):
        return None
    config = hosts[0].config.task
    return SharedBatchIterator(
        task.train,
        [training.order for training in hosts],
        config.batch_size,
        config.samples_per_epoch // config.batch_size,
        task.workers,
        Expected(task.sample, task.validation.y, task.classes),
        pinned=task.device.type == "cuda",
    )


def train_in_step(
    shared: SharedBatchIterator,
    hosts: Sequence[HostTraining],
    executor: Executor,
    active: Sequence[HostTraining],
    then: Callable[[HostTraining], None] | None = None,
) -> None:
    """Trains the hosts in ``active`` for one epoch on the batches of ``shared``, which reads for all ``hosts``.

    ``then`` is called for each of them after the last batch.

    Raises the errors of ``executor``, and SharedBatchError, with env, epoch and batch, for data that cannot be read.
    """
    groups: dict[int, list[ParameterGroup]] = {}

    def begin(training: HostTraining) -> None:
        groups[training.index] = prepare_epoch(training)

    def learn(
        number: int,
        batches: dict[int, Batch],
        training: HostTraining,
    ) -> None:
        training.batch = number
        x, y = batches[training.index]
        # PyTorch keeps pinned memory alive until a copy from it is done.
        x = x.to(training.device, non_blocking=True)
        y = y.to(training.device, non_blocking=True)
        train_step(training, groups[training.index], x, y)

    executor.run(begin, active)
    indices = [training.index for training in hosts]
    number = 0
    try:
        for number, batches in enumerate(shared.epoch()):
            by_host = dict(zip(indices, batches, strict=True))
            executor.run(partial(learn, number, by_host), active)
    except SharedBatchError as error:
        raise _placed(error, indices, active) from error
    except RuntimeError as error:
        if not worker_died(error):  # torch raises this wherever the main thread happens to be
            raise
        died = SharedBatchError(f"a worker died: {error}", batch=number)
        raise _placed(died, indices, active) from error
    for training in active:
        training.epoch += 1
    if then is not None:
        executor.run(then, active)


def _placed(
    error: SharedBatchError,
    indices: Sequence[int],
    active: Sequence[HostTraining],
) -> SharedBatchError:
    """Returns the error with the env, by its own index, and the epoch; with all active envs if it is of none."""
    if error.env is None:
        env = None
        failed = [training.index for training in active]
    else:
        env = indices[error.env]
        failed = [env]
    epoch = active[0].epoch if active else 0
    envs = "envs" if len(failed) > 1 else "env"
    where = f"{envs} {', '.join(map(str, failed))}, epoch {epoch}, batch {error.batch}"
    return SharedBatchError(
        f"{where}: {error}",
        env=env,
        batch=error.batch,
    )
