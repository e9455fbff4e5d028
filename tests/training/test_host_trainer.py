"""Training epochs of all hosts, on data in memory or streamed, and the error for a lack of memory (M12)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

from esper.config import ConfigError
from esper.data.split import Split
from esper.data.task import Task, resolve
from esper.training import step
from esper.training.execution.workers import WorkerExecutor
from esper.training.executor import OutOfMemory, ran_out
from esper.training.host_trainer import HostTrainer
from esper.training.host_training import HostTraining
from esper.training.metrics import EpochMetrics, make_metrics
from tests.core_helpers import digits, plant, same_bits, tensors_of, tiny_config
from tests.env.test_training_backend import run_here
from tests.training.growing import BATCH, KINDS, Growing, validate

FULL = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried 9 bytes."


def shrink(
    env: HostTraining,
    room: int,
    from_batch: int = 0,
    error: Callable[[], Exception] = lambda: RuntimeError(FULL),
    training: bool = True,
) -> None:
    """Limits ``env`` to memory for ``room`` samples from batch ``from_batch`` of an epoch on, or in validation."""

    def check(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        short = len(arguments[0]) > room and env.batch >= from_batch
        if short and env.host.training is training:
            raise error()

    env.host.segments[1].register_forward_pre_hook(check)  # type: ignore[operator, union-attr]


@pytest.mark.finding("M12")
def test_a_shortage_is_an_error_that_says_what_takes_less() -> None:
    with Growing(KINDS["float images"], WorkerExecutor(2)) as made:
        made.reset()
        made.epoch()
        shrink(made.hosts[1], BATCH // 2, from_batch=1)
        shrink(made.hosts[0], 20, training=False)
        words = r"env 1, epoch 1, batch 1: RuntimeError: .*can't allocate"
        with pytest.raises(OutOfMemory, match=words) as caught:
            made.trainer.epoch(made.hosts)
        found = caught.value
        assert (found.env, found.epoch, found.batch) == (1, 1, 1)
        assert "--set task.micro_batches=2" in str(found)
        assert f"task.batch_size (here {BATCH})" in str(found)
        assert "env.n_envs, here 2" in str(found)
        with pytest.raises(OutOfMemory, match="env 0, epoch 2, "):
            made.trainer.run(validate, made.hosts)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), True),
        (RuntimeError(FULL), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory\nCompile with ..."), True),
        (RuntimeError("out of memory (CUDA error 2)"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (
            RuntimeError("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
            True,
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("not enough memory of yesterday"), False),
    ],
)
def test_errors_that_count_as_a_shortage_of_memory(
    error: Exception, expected: bool
) -> None:
    assert ran_out(error) is expected


def test_the_allocator_of_this_torch_raises_a_known_message() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58, dtype=torch.uint8)
    assert ran_out(caught.value)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """The training split, as a dataset that could lie on a disk; row ``torn`` cannot be read."""

    def __init__(self, torn: int | None = None, size: int | None = None) -> None:
        split = digits().train
        assert isinstance(split, Split)
        self.split, self.torn = split, torn
        self.size = len(split) if size is None else size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        if self.torn is not None and row >= self.torn:
            raise OSError(f"row {row} is torn")
        return self.split.x[row], self.split.y[row]


def streamed(workers: int = 1, torn: int | None = None) -> Task:
    return replace(digits(), train=Rows(torn), workers=workers)


@contextmanager
def trainer_of(
    task: Task, envs: int
) -> Iterator[tuple[HostTrainer, list[HostTraining]]]:
    config = resolve(tiny_config(envs), task)
    rows = make_metrics(envs, torch.device("cpu"))
    made = [HostTraining(i, task, config, rows[i]) for i in range(envs)]
    for training in made:
        training.reset(0, 0)
    with WorkerExecutor(1) as executor:
        trainer = HostTrainer(task, made, executor)
        try:
            yield trainer, made
        finally:
            trainer.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_hosts_are_resident_hosts_to_the_last_bit(workers: int) -> None:
    with (
        trainer_of(digits(), 2) as (resident, a),
        trainer_of(streamed(workers), 2) as (streaming, b),
    ):
        for trainer, envs in ((resident, a), (streaming, b)):
            plant(envs[0], "r0c0")
            for _ in range(2):
                trainer.epoch(envs)
        for one, other in zip(a, b, strict=True):
            same_bits(tensors_of(one), tensors_of(other))
            assert torch.equal(one.totals.training, other.totals.training)
            assert one.epoch == other.epoch == 2


@pytest.mark.trap(31)
def test_a_streamed_epoch_is_begun_by_the_worker_that_adds_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that hands batches out zeroes no totals, and fills no rate and no alpha."""
    threads: list[int] = []

    def noted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*inputs: Any) -> Any:
            threads.append(threading.get_ident())
            return function(*inputs)

        monkeypatch.setattr(owner, name, call)

    with trainer_of(streamed(0), 3) as (trainer, envs):
        for owner, name in (
            (EpochMetrics, "zero_training"),
            (EpochMetrics, "add_training"),
            (step, "learning_groups"),
        ):
            noted(owner, name)
        trainer.epoch(envs)
    assert len(threads) == 3 * (2 + 2)  # of each env, begun once and two batches
    assert threading.get_ident() not in threads


@pytest.mark.trap(33)
def test_a_batch_that_streams_in_is_copied_without_a_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        WorkerExecutor, "run", run_here
    )  # modes of torch belong to a thread
    copies: list[bool] = []

    class Copies(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function is Tensor.to and args[1:] == (torch.device("cpu"),):
                copies.append((kwargs or {}).get("non_blocking", False))
            return function(*args, **(kwargs or {}))

    with trainer_of(streamed(0), 2) as (trainer, envs), Copies():
        trainer.epoch(envs)
    assert copies == [True] * (
        2 * 2 * 2
    )  # inputs and targets of two batches of two envs


def test_a_host_that_has_ended_is_left_alone() -> None:
    with trainer_of(streamed(0), 2) as (trainer, envs):
        before = tensors_of(envs[0])
        trainer.epoch([envs[1]])
        same_bits(before, tensors_of(envs[0]))
        assert (envs[0].epoch, envs[1].epoch) == (0, 1)


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match="train split: it has no samples"):
        replace(digits(), train=Rows(size=0))
