"""Lanes of a GPU, on a device that is none: errors, cancelled epochs, and the end."""

import pytest

from esper.training import host_step
from esper.training.env_state import ParallelEnvState
from esper.training.gpu_lanes import WARM_UP
from esper.training.lanes import Cancelled, LaneError
from tests.training.fake_gpu import FakeGpu, fake_lanes
from tests.training.growing import BATCHES, KINDS, Growing


def growing(gpu: FakeGpu, n: int = 2, capture: bool = True) -> Growing:
    made = Growing(KINDS["float images"], fake_lanes(gpu, capture), n)
    gpu.envs = made.envs
    made.reset()
    return made


@pytest.mark.parametrize("step", [0, 2, BATCHES])
def test_finding_m12_an_error_in_a_step_leaves_the_others_and_says_where(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the warm-up, and in an ordinary epoch."""
    gpu = FakeGpu()
    with growing(gpu, n=3, capture=step < WARM_UP) as made:
        done = 0
        inner = host_step.train_step

        def train_step(env: ParallelEnvState, *rest: object) -> None:
            nonlocal done
            if env.index == 1:
                if done == step:
                    raise ZeroDivisionError("by zero")
                done += 1
            inner(env, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr("esper.training.gpu_lanes.train_step", train_step)
        if step == BATCHES:
            made.trainer.epoch(made.envs)
        place = f"env 1, epoch {step // BATCHES}, batch {step % BATCHES}: ZeroDivisionError: by zero"
        with pytest.raises(LaneError, match=place):
            made.trainer.epoch(made.envs)
        epochs = step // BATCHES
        assert [env.epoch for env in made.envs] == [epochs + 1, epochs, epochs + 1]


@pytest.mark.parametrize("step", [0, 4])
def test_a_launch_that_fails_ends_its_env_only(step: int) -> None:
    gpu = FakeGpu()
    with growing(gpu, n=3) as made:
        made.trainer.epoch(made.envs)
        gpu.fail_at = (1, step)
        with pytest.raises(LaneError, match=f"env 1, epoch 1, batch {step}: RuntimeError: unspecified launch failure"):
            made.trainer.epoch(made.envs)
        assert [env.epoch for env in made.envs] == [2, 1, 2]
        assert [env.collector.batches for env in made.envs] == [BATCHES, step, BATCHES]


def test_an_error_before_the_first_step_is_the_envs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    with growing(gpu) as made:

        def begin(*_arguments: object) -> None:
            raise OSError("no order")

        feed = made.envs[0].feed
        assert feed is not None
        monkeypatch.setattr(feed, "begin", begin)
        with pytest.raises(LaneError, match="env 0, epoch 0, batch 0: OSError: no order"):
            made.trainer.epoch(made.envs)
        assert [env.epoch for env in made.envs] == [0, 1]


def test_a_cancelled_epoch_is_not_counted_and_the_next_is_free() -> None:
    gpu = FakeGpu()
    with growing(gpu) as made:
        made.trainer.epoch(made.envs)
        gpu.before_launch = lambda lane, step: made.lanes.cancel() if (lane, step) == (1, 2) else None
        with pytest.raises(Cancelled):
            made.trainer.epoch(made.envs)
        assert [(env.epoch, env.batch, env.collector.batches) for env in made.envs] == [(1, 2, 3)] * 2
        gpu.before_launch = lambda _lane, _step: None
        made.trainer.epoch(made.envs)
        assert [env.epoch for env in made.envs] == [2, 2]


def test_a_cancelled_warm_up_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    with growing(gpu) as made:
        inner = host_step.train_step

        def train_step(env: ParallelEnvState, *rest: object) -> None:
            inner(env, *rest)  # type: ignore[arg-type]
            made.lanes.cancel()

        monkeypatch.setattr("esper.training.gpu_lanes.train_step", train_step)
        with pytest.raises(Cancelled):
            made.trainer.epoch(made.envs)
        assert not gpu.captured
        assert [env.epoch for env in made.envs] == [0, 0]
        with pytest.raises(Cancelled):
            made.lanes.run(lambda _env: made.lanes.cancel(), made.envs)
        made.lanes.run(lambda env: made.lanes.cancel() if env.index == 1 else None, made.envs)  # nothing is left out


def test_closing_waits_and_drops_everything_and_work_is_done_as_it_is_from_then_on() -> None:
    gpu = FakeGpu()
    with growing(gpu) as made:
        made.episodes(1, 3)
        kept = len(gpu.captured)
        assert kept > 0
        made.lanes.close()
        made.lanes.close()
        assert "synchronize" in gpu.calls
        made.validate()
        made.validate()
        made.validate()
        assert len(gpu.captured) == kept
        assert sum(len(cache) for cache in made.lanes._caches.values()) == 0  # type: ignore[union-attr]
