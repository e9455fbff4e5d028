"""The executor of a GPU on a fake device: errors, cancelled epochs, and closing."""

import pytest
import torch

from esper.core.stage import SeedStage
from esper.training import step as host_step
from esper.training.execution.streams import WARM_UP
from esper.training.execution.workers import WorkerExecutor
from esper.training.executor import Cancelled, DeviceFailed, HostError, OutOfMemory
from esper.training.host_training import HostTraining
from tests.training.fake_gpu import FakeGpu, fake_executor
from tests.training.growing import BATCHES, KINDS, Growing, assert_same


def growing(gpu: FakeGpu, n: int = 2, capture: bool = True) -> Growing:
    made = Growing(KINDS["float images"], fake_executor(gpu, capture), n)
    gpu.hosts = made.hosts
    made.reset()
    return made


@pytest.mark.finding("M12")
@pytest.mark.parametrize("step", [0, 2, BATCHES])
def test_an_error_in_a_step_leaves_the_others_and_says_where(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is in the warm-up, or in an ordinary epoch."""
    gpu = FakeGpu()
    with growing(gpu, n=3, capture=step < WARM_UP) as made:
        done = 0
        inner = host_step.train_step

        def train_step(training: HostTraining, *rest: object) -> None:
            nonlocal done
            if training.index == 1:
                if done == step:
                    raise ZeroDivisionError("by zero")
                done += 1
            inner(training, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr("esper.training.execution.streams.train_step", train_step)
        if step == BATCHES:
            made.trainer.epoch(made.hosts)
        place = f"env 1, epoch {step // BATCHES}, batch {step % BATCHES}: ZeroDivisionError: by zero"
        with pytest.raises(HostError, match=place):
            made.trainer.epoch(made.hosts)
        epochs = step // BATCHES
        assert [training.epoch for training in made.hosts] == [
            epochs + 1,
            epochs,
            epochs + 1,
        ]


@pytest.mark.parametrize("step", [0, 4])
def test_a_launch_that_fails_ends_its_env_only(step: int) -> None:
    gpu = FakeGpu()
    with growing(gpu, n=3) as made:
        made.trainer.epoch(made.hosts)
        gpu.fail_at = (1, step)
        with pytest.raises(
            HostError,
            match=f"env 1, epoch 1, batch {step}: RuntimeError: unspecified launch failure",
        ):
            made.trainer.epoch(made.hosts)
        assert [training.epoch for training in made.hosts] == [2, 1, 2]
        assert [training.gradient_stats.batches for training in made.hosts] == [
            BATCHES,
            step,
            BATCHES,
        ]


def test_an_error_before_the_first_step_is_the_envs_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu()
    with growing(gpu) as made:

        def shuffle(*_arguments: object) -> None:
            raise OSError("no order")

        feed = made.hosts[0].feed
        assert feed is not None
        monkeypatch.setattr(feed, "shuffle", shuffle)
        with pytest.raises(
            HostError, match="env 0, epoch 0, batch 0: OSError: no order"
        ):
            made.trainer.epoch(made.hosts)
        assert [training.epoch for training in made.hosts] == [0, 1]


def test_a_cancelled_epoch_is_not_counted_and_the_next_is_free() -> None:
    gpu = FakeGpu()
    with growing(gpu) as made:
        made.trainer.epoch(made.hosts)
        gpu.before_launch = lambda stream, step: (
            made.executor.cancel() if (stream, step) == (1, 2) else None
        )
        with pytest.raises(Cancelled):
            made.trainer.epoch(made.hosts)
        assert [
            (training.epoch, training.batch, training.gradient_stats.batches)
            for training in made.hosts
        ] == [(1, 2, 3)] * 2
        gpu.before_launch = lambda _stream, _step: None
        made.trainer.epoch(made.hosts)
        assert [training.epoch for training in made.hosts] == [2, 2]


def test_a_cancelled_warm_up_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    with growing(gpu) as made:
        inner = host_step.train_step

        def train_step(training: HostTraining, *rest: object) -> None:
            inner(training, *rest)  # type: ignore[arg-type]
            made.executor.cancel()

        monkeypatch.setattr("esper.training.execution.streams.train_step", train_step)
        with pytest.raises(Cancelled):
            made.trainer.epoch(made.hosts)
        assert not gpu.captured
        assert [training.epoch for training in made.hosts] == [0, 0]
        with pytest.raises(Cancelled):
            made.executor.run(lambda _env: made.executor.cancel(), made.hosts)
        made.executor.run(
            lambda training: made.executor.cancel() if training.index == 1 else None,
            made.hosts,
        )  # nothing is left out


def test_closing_waits_and_drops_everything_and_work_is_done_as_it_is_from_then_on() -> (
    None
):
    gpu = FakeGpu()
    with growing(gpu) as made:
        made.episodes(1, 3)
        kept = len(gpu.captured)
        assert kept > 0
        made.executor.close()
        made.executor.close()
        assert "synchronize" in gpu.calls
        assert [stream.number for stream in gpu.idle] == [1, 2], "for the next executor"
        made.validate()
        made.validate()
        made.validate()
        assert len(gpu.captured) == kept
        assert made.executor.graphs == {}  # type: ignore[union-attr]


FAULT = RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("words", ["out of memory", "CUDA error: out of memory"])
def test_no_memory_for_a_capture_ends_the_run_with_advice(words: str) -> None:
    gpu = FakeGpu()
    with growing(gpu) as made:
        gpu.refusal = torch.OutOfMemoryError(words)
        with pytest.raises(OutOfMemory, match=r"--set task\.micro_batches=2"):
            made.trainer.epoch(made.hosts)
        assert made.executor.reasons() == {}
        gpu.refusal = None
        assert not gpu.failed, "its memory was given back"


def test_a_failed_capture_ends_the_other_work_that_was_captured_on_its_stream() -> None:
    """The stand-in refuses to launch it; it is captured again."""
    gpu = FakeGpu()
    with (
        Growing(KINDS["float images"], WorkerExecutor(1)) as plain,
        growing(gpu) as made,
    ):
        plain.reset()
        assert_same(made.epoch(), plain.epoch())
        captured = len(gpu.captured)
        assert captured == 2
        gpu.refusal = ValueError("not while you watch")
        for world in (plain, made):
            world.plant(0, "r0c0", SeedStage.HOLDING)
        assert_same(made.epoch(), plain.epoch())
        assert all(
            one.dead for one in gpu.captured
        )  # a step of one, a validation of the other
        gpu.refusal = None
        for world in (plain, made):
            world.hosts[0].remove(world.hosts[0].site_by_name["r0c0"])
        assert_same(made.epoch(), plain.epoch())
        assert len(gpu.captured) > captured


def test_a_capture_that_breaks_the_gpu_is_the_envs_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu()

    def breaks(*_arguments: object) -> None:
        gpu.broken = FAULT
        raise ValueError("of the network")

    with growing(gpu, n=1) as made:
        monkeypatch.setattr(gpu, "capture", breaks)
        with pytest.raises(
            HostError, match="env 0, epoch 0, batch 2: ValueError: of the network"
        ) as caught:
            made.trainer.epoch(made.hosts)
        assert caught.value.causes[0].__notes__ == [
            f"After that, the GPU failed: RuntimeError: {FAULT}"
        ]
        gpu.broken = None


def test_a_fault_of_the_gpu_is_the_error_of_the_env_that_met_it() -> None:
    """The fault lasts: every later call fails as well, also those that wait for streams."""
    gpu = FakeGpu()

    def work(training: HostTraining) -> None:
        if training.index == 1:
            gpu.broken = FAULT
            raise FAULT

    with growing(gpu, n=3) as made:
        with pytest.raises(
            HostError,
            match="env 1, epoch 0, batch 0: RuntimeError: CUDA error: an illegal",
        ) as caught:
            made.executor.run(work, made.hosts)
        assert [
            "as work ended for env 0, 1, 2" in note for note in caught.value.__notes__
        ] == [True]
        gpu.broken = None


def test_a_fault_of_the_gpu_that_no_env_met_has_a_type() -> None:
    gpu = FakeGpu()

    def work(training: HostTraining) -> None:
        gpu.broken = FAULT

    with growing(gpu) as made:
        with pytest.raises(
            DeviceFailed, match="as work ended for env 0, 1: RuntimeError: CUDA error"
        ) as caught:
            made.executor.run(work, made.hosts)
        assert caught.value.__cause__ is FAULT
        with pytest.raises(
            DeviceFailed, match="as work began for env 0, 1: RuntimeError: CUDA error"
        ):
            made.executor.run(work, made.hosts)
        gpu.broken = None


def test_closing_drops_everything_though_the_gpu_has_failed() -> None:
    gpu = FakeGpu()
    with growing(gpu) as made:
        made.epoch()
        gpu.broken = FAULT
        executor = made.executor
        with pytest.raises(RuntimeError, match="illegal memory access"):
            executor.close()
        assert executor.graphs == {}  # type: ignore[union-attr]
        assert gpu.idle == [], "work may still be under way on its streams"
        gpu.broken = None
        made.validate()
        made.validate()
        assert len(gpu.captured) == 2, "work is done as it is from then on"
