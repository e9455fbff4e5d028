"""Memory runs out in a worker: the epoch is repeated once, as if it had begun with smaller micro-batches (M12)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.data.task import resolve
from esper.env.make import EnvMaker
from esper.env.vector_env import GrowthVectorEnv
from esper.lifecycle.stage import SeedStage as S
from esper.seeds.blueprints import BLUEPRINTS, Blueprint, BlueprintRegistry
from esper.telemetry.event import Event, MicroBatchHalved
from esper.training import host_trainer, micro_batching
from esper.training.execution.streams import StreamExecutor
from esper.training.execution.workers import WorkerExecutor
from esper.training.executor import Executor, HostError
from esper.training.host_state import State, host_state
from esper.training.host_training import HostTraining
from esper.training.micro_batching import (
    MicroBatchPolicy,
    OutOfMemory,
    may_run_out,
    ran_out,
)
from tests.core_helpers import (
    digits,
    flat_baseline,
    rig,
    same_bits,
    tensors_of,
    tiny_config,
)
from tests.selection import slow_except
from tests.training.fake_gpu import FakeGpu, fake_executor
from tests.training.growing import (
    BATCH,
    KINDS,
    Dropping,
    Growing,
    Record,
    assert_same,
    validate,
)
from tests.training.test_streamed import streamed

FULL = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried 9 bytes."
REGISTRY = BlueprintRegistry(
    (
        BLUEPRINTS.get("cnn", "conv_light"),
        Blueprint("cnn", "dropping", "a test's own", Dropping, lambda c: 2 * c),
    )
)


@pytest.fixture
def copies_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies the state before every epoch, as on a GPU that is short of memory."""
    monkeypatch.setattr(micro_batching, "may_run_out", lambda *_device_and_epoch: True)


def shrink(
    env: HostTraining,
    room: int,
    from_batch: int = 0,
    error: Callable[[], Exception] | None = None,
    training: bool = True,
) -> None:
    """Limits ``env`` to memory for ``room`` samples from batch ``from_batch`` of an epoch on, or in validation."""

    def check(_module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if (
            len(arguments[0]) > room
            and env.host.training is training
            and env.batch >= from_batch
        ):
            raise RuntimeError(FULL) if error is None else error()

    env.host.segments[1].register_forward_pre_hook(check)  # type: ignore[operator, union-attr]


def course(
    executor: Executor, hurt: Callable[[Growing], Any], kind: str = "float images"
) -> Growing:
    """Envs with a seed that incubates, on a CPU with dropout, and one that is blended; ``hurt`` acts before the third
    epoch, in which incubation begins."""
    made = Growing(KINDS[kind], executor, registry=REGISTRY)
    if isinstance(executor, StreamExecutor):
        executor.gpu.hosts = made.hosts  # type: ignore[attr-defined]
    made.reset()
    made.epoch()
    for env in range(2):
        made.plant(env, "r1c1", S.HOLDING)
    made.epoch()
    for env in range(2):
        made.plant(
            env,
            "r0c0",
            S.TRAINING,
            "dropping" if isinstance(executor, WorkerExecutor) else "conv_light",
        )
    hurt(made)
    return made


def finished(made: Growing) -> list[Record]:
    with made:
        records = [record for _ in range(3) for record in made.epoch()]
        assert {env.micro_batches for env in made.hosts} == {
            2 * made.config.task.micro_batches
        }
        return records


def from_here_on(made: Growing) -> None:
    """The reference of a repeated epoch: twice the parts from its beginning."""
    made.trainer.policy.restore(2 * made.trainer.policy.count)


@pytest.mark.finding("M12")
@pytest.mark.usefixtures("copies_kept")
@pytest.mark.parametrize(
    "kind",
    slow_except(
        ["float images"], ["float images", "ste", "bytes in bfloat16, micro-batches"]
    ),
)
def test_the_epoch_is_done_again_in_parts_to_the_last_bit(kind: str) -> None:
    """All that the failed batch and those before it did is gone: weights, statistics of BatchNorm, draws, totals."""
    parts = KINDS[kind].micro_batches
    hurt = course(
        WorkerExecutor(2),
        lambda made: shrink(made.hosts[1], BATCH // (2 * parts), from_batch=2),
        kind=kind,
    )
    events: list[Event] = []
    hurt.trainer.policy.on_split = events.append
    expected = finished(course(WorkerExecutor(1), from_here_on, kind=kind))
    assert_same(finished(hurt), expected)
    (event,) = events
    assert isinstance(event, MicroBatchHalved)
    assert (event.env, event.epoch, event.batch, event.micro_batches) == (
        1,
        2,
        2,
        2 * parts,
    )
    assert "can't allocate memory" in event.reason


@pytest.mark.finding("M12")
@pytest.mark.usefixtures("copies_kept")
@pytest.mark.parametrize("fitting", slow_except([5], [0, 5, 20]))
def test_no_memory_for_copies_of_how_the_epoch_began(
    fitting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One host has a part of the copies, and another all of them: nothing is mixed up, and none are made again."""
    hurt = course(WorkerExecutor(2), lambda _made: None)
    copied: list[int] = []

    def too_large(training: HostTraining, copy: Callable[[Tensor], Tensor]) -> State:
        room = fitting if training.index == 1 else 1_000
        copied.append(training.index)

        def fits(tensor: Tensor) -> Tensor:
            nonlocal room
            room -= 1
            if room < 0:
                raise RuntimeError(FULL)
            return copy(tensor)

        return host_state(training, fits)

    monkeypatch.setattr(host_trainer, "host_state", too_large)
    records = finished(hurt)
    assert sorted(copied) == [0, 1]
    monkeypatch.setattr(host_trainer, "host_state", host_state)
    assert_same(records, finished(course(WorkerExecutor(1), from_here_on)))


@pytest.mark.finding("M12")
@pytest.mark.usefixtures("copies_kept")
def test_captured_work_of_whole_batches_is_dropped() -> None:
    gpu, other = FakeGpu(), FakeGpu()
    hurt = course(
        fake_executor(gpu),
        lambda made: shrink(
            made.hosts[0], BATCH // 2, error=lambda: torch.OutOfMemoryError("CUDA")
        ),
    )
    before = len(gpu.captured)
    assert before
    expected = finished(course(fake_executor(other), from_here_on))
    assert_same(finished(hurt), expected)
    assert sum(one.times for one in gpu.captured[before:]) > 10
    assert "give back" in gpu.calls
    with (
        course(fake_executor(FakeGpu()), lambda _made: None) as whole,
        pytest.raises(AssertionError),
    ):
        assert_same(
            expected[:2], whole.epoch()
        )  # what BatchNorm sees in parts is something else


@pytest.mark.finding("M12")
@pytest.mark.usefixtures("copies_kept")
def test_a_second_shortage_is_an_error_that_says_what_takes_less() -> None:
    with course(
        WorkerExecutor(1), lambda made: shrink(made.hosts[1], BATCH // 4, from_batch=1)
    ) as made:
        events: list[Event] = []
        made.trainer.policy.on_split = events.append
        with pytest.raises(
            OutOfMemory,
            match=r"env 1, epoch 2, batch 1: RuntimeError: .*can't allocate",
        ) as caught:
            made.trainer.epoch(made.hosts)
        assert (caught.value.env, caught.value.epoch, caught.value.batch) == (1, 2, 1)
        assert "--set task.micro_batches=4" in str(caught.value)
        assert f"task.batch_size (here {BATCH})" in str(caught.value)
        assert "env.n_envs, here 2" in str(caught.value)
        assert len(events) == 1


@pytest.mark.usefixtures("copies_kept")
def test_a_batch_that_cannot_be_cut_smaller_is_not_tried_again() -> None:
    with Growing(
        KINDS["float images"], WorkerExecutor(1), 1, micro_batches=BATCH
    ) as made:
        made.reset()
        shrink(made.hosts[0], 0)
        with pytest.raises(OutOfMemory, match="env 0, epoch 0, batch 0"):
            made.trainer.epoch(made.hosts)
        assert not made.trainer.policy.was_split


@pytest.mark.usefixtures("copies_kept")
def test_another_error_is_what_it_was_even_beside_a_shortage() -> None:
    def hurt(made: Growing) -> None:
        shrink(made.hosts[0], BATCH // 2)
        shrink(made.hosts[1], 0, error=lambda: ValueError("broken"))

    with course(WorkerExecutor(1), hurt) as made, pytest.raises(HostError) as caught:
        made.trainer.epoch(made.hosts)
    assert not isinstance(caught.value, OutOfMemory)
    assert not made.trainer.policy.was_split


@pytest.mark.finding("M12")
@pytest.mark.usefixtures("copies_kept")
@pytest.mark.parametrize("workers", slow_except([0], [0, 1]))
def test_hosts_whose_data_streams_begin_the_epoch_again(workers: int) -> None:
    """Hosts are in step: the others have learned from the batch that was too large for one."""
    worlds = []
    for hurt in (True, False):
        env = GrowthVectorEnv(
            streamed(workers), tiny_config(3, 6), baseline=flat_baseline(6)
        )
        env.reset(seed=0)
        wait = torch.zeros(3, 8, dtype=torch.int64).numpy()
        env.step(wait)
        shrink(env.training[2], 16, from_batch=1) if hurt else env.parts.restore(2)
        env.step(wait)
        env.step(wait)
        worlds.append([tensors_of(training) for training in env.training])
        assert env.parts.count == 2
        env.close()
    for one, other in zip(*worlds, strict=True):
        same_bits(one, other)


@pytest.mark.finding("M12")
def test_validation_takes_half_at_once() -> None:
    with rig(2, 6) as plain, rig(2, 6) as hurt:
        for world in (plain, hurt):
            world.step()
        shrink(hurt.training(0), 250, training=False)
        for world in (plain, hurt):
            world.step()
        (event,) = hurt.of_kind(MicroBatchHalved)
        assert (event.env, event.epoch) == (0, 2)
        assert hurt.training(1).evaluation_batch == 250
        # Results are the same but for rounding, because sums have other parts.
        for one, other in zip(
            plain.env.backend.each, hurt.env.backend.each, strict=True
        ):
            same_bits(tensors_of(one.training), tensors_of(other.training))
        assert plain.env.state.accuracy.tolist() == hurt.env.state.accuracy.tolist()
        assert plain.env.state.loss == pytest.approx(hurt.env.state.loss, rel=1e-5)


@pytest.mark.finding("M12")
@pytest.mark.usefixtures("copies_kept")
def test_all_hosts_of_a_run_are_cut_alike() -> None:
    """Those that grow, their twins, and those made later; or pairs would differ in more than growth."""
    told: list[Event] = []
    maker = EnvMaker.of(tiny_config(1, 4), digits())
    env, twins = maker.make(emit=told.append), maker.make()
    assert isinstance(env, GrowthVectorEnv)
    assert isinstance(twins, GrowthVectorEnv)
    wait = torch.zeros(1, 8, dtype=torch.int64).numpy()
    for one in (env, twins):
        one.baseline = flat_baseline(4)
        one.reset(seed=0)
    shrink(twins.training[0], 16)
    twins.step(wait)
    env.step(wait)
    later = maker.make()
    assert isinstance(later, GrowthVectorEnv)
    later.baseline = flat_baseline(4)
    later.reset(seed=0)
    assert [made.training[0].micro_batches for made in (env, twins, later)] == [2, 2, 2]
    same_bits(tensors_of(env.training[0]), tensors_of(twins.training[0]))
    assert [type(event) for event in told].count(MicroBatchHalved) == 1
    for one in (env, twins, later):
        one.close()


@pytest.mark.finding("M12")
def test_without_a_copy_the_first_shortage_is_the_error_that_says_what_takes_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This is the default on a CPU: an epoch copies nothing. Validation needs no copy and is repeated."""

    def copies(*_arguments: object) -> None:
        raise AssertionError("a copy")

    monkeypatch.setattr(host_trainer, "host_state", copies)
    with course(
        WorkerExecutor(1), lambda made: shrink(made.hosts[1], BATCH // 2, from_batch=1)
    ) as made:
        with pytest.raises(OutOfMemory, match=r"--set task\.micro_batches=2") as caught:
            made.trainer.epoch(made.hosts)
        assert (caught.value.env, caught.value.epoch, caught.value.batch) == (1, 2, 1)
        assert "since it ran out before" not in str(caught.value)
        assert not made.trainer.policy.was_split
        shrink(made.hosts[0], 20, training=False)
        made.trainer.repeatable(validate, made.hosts)
        assert made.trainer.policy.was_split
        with pytest.raises(OutOfMemory, match="although batches are split into 2"):
            made.trainer.repeatable(
                lambda _env: torch.empty(2**58, dtype=torch.uint8) and None, made.hosts
            )


def test_the_first_epoch_and_those_that_are_short_of_memory_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[int] = []

    def noted(training: HostTraining, copy: Callable[[Tensor], Tensor]) -> State:
        copied.append(training.index)
        return host_state(training, copy)

    monkeypatch.setattr(host_trainer, "host_state", noted)
    short = False
    monkeypatch.setattr(
        micro_batching, "may_run_out", lambda _device, first_epoch: first_epoch or short
    )
    with Growing(KINDS["float images"], WorkerExecutor(1)) as made:
        made.reset()
        made.epoch()
        made.epoch()
        assert copied == [0, 1]
        short = True
        made.trainer.epoch(made.hosts[1:])
        assert copied == [0, 1, 1]
        made.trainer.policy.restore(2)  # no epoch can be repeated now
        made.epoch()
        assert copied == [0, 1, 1]


@pytest.mark.parametrize(
    ("device", "first_epoch", "free", "expected"),
    [
        ("cuda:1", True, 80, True),
        ("cuda:1", False, 20, False),
        ("cuda:1", False, 19, True),
        ("cpu", True, 0, False),
        ("cpu", False, 0, False),
    ],
)
def test_a_gpu_is_short_of_memory_below_a_quarter(
    device: str,
    first_epoch: bool,
    free: int,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 80))
    assert may_run_out(torch.device(device), first_epoch) is expected


def test_a_resumed_run_has_its_number_of_micro_batches() -> None:
    policy = MicroBatchPolicy(tiny_config(task={"micro_batches": 2}))
    assert policy.evaluation_batch(500) == 500
    policy.restore(4)
    assert (policy.was_split, policy.can_split, policy.evaluation_batch(501)) == (
        True,
        False,
        251,
    )
    policy.restore(2)
    assert (policy.was_split, policy.can_split) == (False, True)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
            True,
        ),
        (RuntimeError(FULL), True),
        (MemoryError(), True),
        (
            RuntimeError(
                "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"
            ),
            True,
        ),
        (RuntimeError("out of memory (CUDA error 2)"), True),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (
            RuntimeError(
                "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
            ),
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


@pytest.mark.parametrize("count", [0, -1, 3, 8])
def test_no_other_number_is_resumed(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} micro-batches; the config has 2"):
        MicroBatchPolicy(
            resolve(tiny_config(task={"micro_batches": 2}), digits())
        ).restore(count)
