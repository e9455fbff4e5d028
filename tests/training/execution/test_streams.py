"""The executor of a GPU on a fake device: captured work, its launches, and failed captures."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from esper.core.blueprints import BLUEPRINTS
from esper.core.stage import SeedStage
from esper.training.execution.graph_cache import REPLACES, WAITS
from esper.training.execution.streams import WARM_UP
from esper.training.execution.workers import WorkerExecutor
from tests.selection import slow_except
from tests.training.fake_gpu import FakeGpu, fake_executor
from tests.training.growing import (
    BATCHES,
    KINDS,
    Dropping,
    Growing,
    Kind,
    assert_same,
    float_images,
)
from tests.training.live_tensors import Live, live_tensors

S = SeedStage


@contextmanager
def growing(
    gpu: FakeGpu, n: int = 2, kind: str = "float images", capture: bool = True
) -> Iterator[Growing]:
    with Growing(KINDS[kind], fake_executor(gpu, capture), n) as made:
        gpu.hosts = made.hosts
        made.reset()
        yield made


def launches(gpu: FakeGpu) -> list[str]:
    return [call for call in gpu.calls if call.startswith("launch")]


@pytest.mark.parametrize(
    ("kind", "seed"),
    slow_except([("ste", 0)], [*((kind, 0) for kind in KINDS), ("bytes", 2)]),
)
def test_captured_hosts_grow_as_others_do_to_the_last_bit(kind: str, seed: int) -> None:
    with Growing(KINDS[kind], WorkerExecutor(1)) as plain:
        expected = plain.episodes(1, 6, seed)
    gpu = FakeGpu()
    with growing(gpu, kind=kind) as made:
        assert_same(made.episodes(1, 6, seed), expected)
        assert sum(one.times for one in gpu.captured) > 10
        assert made.executor.reasons() == {}  # type: ignore[union-attr]


def test_what_is_not_captured_is_queued_to_the_same_bits() -> None:
    with Growing(KINDS["float images"], WorkerExecutor(1)) as plain:
        expected = plain.episodes(1, 3)
    gpu = FakeGpu()
    with growing(gpu, capture=False) as made:
        assert_same(made.episodes(1, 3), expected)
    assert not gpu.captured


def test_an_epoch_warms_up_captures_and_launches_the_rest() -> None:
    gpu = FakeGpu()
    with growing(gpu) as made:
        made.trainer.epoch(made.hosts)
        made.trainer.epoch(made.hosts)
        assert gpu.calls == [
            "fork [1, 2]",
            "capture 1",
            "capture 2",
            f"launch {[BATCHES - WARM_UP] * 2}",
            "join [1, 2]",
            "fork [1, 2]",
            f"launch {[BATCHES] * 2}",
            "join [1, 2]",
        ]
        assert [
            (training.epoch, training.batch, training.gradient_stats.batches)
            for training in made.hosts
        ] == [(2, BATCHES - 1, BATCHES)] * 2


def test_validation_is_captured_when_it_is_done_for_the_second_time() -> None:
    gpu = FakeGpu()
    with growing(gpu, n=1) as made:
        for captured in (0, 1, 1):
            made.validate()
            assert len(gpu.captured) == captured
        assert gpu.captured[0].times == 1


@pytest.mark.trap(40)
def test_rates_alphas_and_targets_act_without_a_new_capture() -> None:
    """The fake device has wrong numbers in Python while it launches, so that only those on the device count."""
    gpu = FakeGpu()
    kind = KINDS["bytes"]
    with Growing(kind, WorkerExecutor(1)) as plain, growing(gpu, kind="bytes") as made:
        plain.reset()
        for world in (plain, made):
            for i in range(2):
                world.plant(i, "r0c0", S.HOLDING)
                world.plant(i, "r1c0", S.TRAINING)
        assert_same(made.epoch(), plain.epoch())
        assert_same(made.epoch(), plain.epoch())
        captured = len(gpu.captured)
        for alpha in (0.3, 0.7):
            for world in (plain, made):
                for training in world.hosts:
                    training.site_by_name["r0c0"].alpha = alpha
                    training.site_by_name["r1c0"].target = 1 - alpha
            assert_same(
                made.epoch(), plain.epoch()
            )  # the learning rate falls with every epoch, too
        assert len(gpu.captured) == captured


def test_a_shadow_is_fresh_though_its_steps_were_captured_with_another_seed() -> None:
    gpu = FakeGpu()
    with (
        Growing(KINDS["float images"], WorkerExecutor(1)) as plain,
        growing(gpu) as made,
    ):
        for episode in range(2):
            for world in (plain, made):
                world.reset(episode)
                for i in range(2):
                    world.plant(i, "r0c1", S.TRAINING)
            assert_same(made.epoch(), plain.epoch())
        assert launches(gpu)[-1] == f"launch {[BATCHES] * 2}"


def test_statistics_have_their_owner_whichever_seed_was_planted_first() -> None:
    gpu = FakeGpu()
    with (
        Growing(KINDS["float images"], WorkerExecutor(1)) as plain,
        growing(gpu) as made,
    ):
        for episode, order in enumerate((("r0c0", "r1c0"), ("r1c0", "r0c0"))):
            for world in (plain, made):
                world.reset(episode)
                for slot in order:
                    world.plant(
                        0, slot, S.HOLDING, "conv_light" if slot == "r0c0" else "norm"
                    )
            assert_same(made.epoch(), plain.epoch())
        assert launches(gpu)[-1] == f"launch {[BATCHES] * 2}"


@pytest.mark.parametrize("trouble", ["waits", "raises"])
def test_work_that_cannot_be_captured_is_queued_and_says_why_once(trouble: str) -> None:
    with Growing(KINDS["float images"], WorkerExecutor(1)) as plain:
        expected = plain.episodes(1, 3)
    gpu = FakeGpu()
    with growing(gpu) as made:
        gpu.waiting = trouble == "waits"
        gpu.refusal = (
            RuntimeError("operation not permitted") if trouble == "raises" else None
        )
        assert_same(made.episodes(1, 3), expected)
        counts = made.executor.reasons()  # type: ignore[union-attr]
        assert list(counts) == [
            WAITS if trouble == "waits" else "RuntimeError: operation not permitted"
        ]
        tried = len(gpu.calls)
        assert_same(made.episodes(1, 3), expected)
        fresh = [call for call in gpu.calls[tried:] if call.startswith("capture")]
        assert (
            len(fresh) <= 2 * 3
        )  # validations that are seen for the second time only now
    assert not gpu.captured


class Noisy(nn.Module):
    """Draws from torch's own generator."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, h: Tensor) -> Tensor:
        return self.scale * nn.functional.dropout(h, 0.5, self.training)


class Renewing(nn.Module):
    """Has a new tensor for a buffer after every step."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(channels, 1, 1))
        self.register_buffer("mean", torch.zeros(channels, 1, 1))

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.mean = (
                0.9 * self.mean + 0.1 * h.detach().mean(dim=(0, 2, 3))[:, None, None]
            )
        return self.scale * (h - self.mean)


ODD: dict[str, tuple[Callable[[int], nn.Module], int, str]] = {
    "dropout": (Dropping, 2, "dropout: launched without torch"),
    "global": (Noisy, 1, "a network draws from torch's own generator"),
    "renewing": (Renewing, 1, REPLACES),
}
"""Seeds, how many parameters they have for each channel, and why their steps are not captured."""


@pytest.mark.parametrize("odd", ODD)
def test_seeds_that_cannot_be_captured_train_as_ever(odd: str) -> None:
    build, each, reason = ODD[odd]
    registry = BLUEPRINTS.copy()
    registry.register("cnn", "odd", parameters=lambda c: each * c)(build)
    gpu = FakeGpu()
    kind = KINDS["float images"]
    with (
        Growing(kind, WorkerExecutor(1), registry=registry) as plain,
        Growing(kind, fake_executor(gpu), registry=registry) as made,
    ):
        gpu.hosts = made.hosts
        for world in (plain, made):
            world.reset()
            world.plant(0, "r0c0", S.HOLDING, "odd")
        for _ in range(3):
            assert_same(made.epoch(), plain.epoch())
        assert len(launches(gpu)) == 3  # the other env is launched
        counts = made.executor.reasons()  # type: ignore[union-attr]
        assert [text.startswith(reason) for text in counts] == [True]
        assert list(counts.values()) == [1]
        for world in (plain, made):  # without that seed, the step is like any other
            world.hosts[0].remove(world.hosts[0].site_by_name["r0c0"])
        assert_same(made.epoch(), plain.epoch())
        assert len(launches(gpu)) == 4
        assert launches(gpu)[-1].count(",") == 1


def test_a_seed_that_does_not_take_part_yet_hinders_no_capture() -> None:
    registry = BLUEPRINTS.copy()
    registry.register("cnn", "global", parameters=lambda c: c)(Noisy)
    registry.register("cnn", "dropout", parameters=lambda c: 2 * c)(Dropping)
    gpu = FakeGpu()
    with Growing(KINDS["float images"], fake_executor(gpu), registry=registry) as made:
        gpu.hosts = made.hosts
        made.reset()
        made.plant(0, "r0c0", S.GERMINATED, "global")
        made.plant(1, "r0c0", S.GERMINATED, "dropout")
        made.trainer.epoch(made.hosts)
        assert len(gpu.captured) == 2
        made.plant(0, "r0c1", S.TRAINING, "global")
        made.plant(1, "r0c1", S.TRAINING, "dropout")
        made.trainer.epoch(made.hosts)
        assert len(gpu.captured) == 2


def test_float16_is_not_captured_and_says_why() -> None:
    gpu = FakeGpu()
    with Growing(
        Kind(float_images, precision="float16"), fake_executor(gpu), 1
    ) as made:
        gpu.hosts = made.hosts
        made.reset()
        made.trainer.epoch(made.hosts)
        assert not gpu.captured
        (reason,) = made.executor.reasons()  # type: ignore[union-attr]
        assert reason.startswith("float16")


def test_a_trainer_that_is_closed_leaves_nothing_of_its_envs_on_the_executor() -> None:
    """The executor stays after the hosts of the baseline are gone."""
    gpu = FakeGpu()
    with growing(gpu) as made:
        made.episodes(1, 3)
        made.trainer.close()
        executor = made.executor
        assert executor.graphs == {}  # type: ignore[union-attr]
        assert executor.reasons() == {}  # type: ignore[union-attr]


def test_captured_work_holds_its_memory() -> None:
    gpu = FakeGpu()
    with growing(gpu, n=1) as made:
        slot = made.plant(0, "r0c0", S.TRAINING)
        made.epoch()
        (one,) = gpu.captured
        training = made.hosts[0]
        held = {id(kept) for kept in one.keeps}
        assert slot.planted is not None
        assert {
            id(slot.seed),
            id(slot.planted.finite),
            id(training.seed_groups["r0c0"]),
            id(training.shadows["r0c0"]),
        } <= held


@pytest.mark.finding("C4")
@pytest.mark.slow
def test_memory_is_flat_over_1000_topologies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that change in every epoch, and more captured work than is kept. What is alive depends on the seeds that
    are; so the maximum of later episodes is compared with that of earlier ones."""
    monkeypatch.setattr("esper.training.execution.graph_cache.MAX_REMEMBERED", 16)
    gpu, dice, sizes = FakeGpu(), random.Random(0), list[Live]()
    with growing(gpu, n=1) as made:
        made.executor.graphs[made.hosts[0].index].limit = 6  # type: ignore[union-attr]
        for epoch in range(1, 1001):
            made.act(dice)
            made.epoch()
            gpu.captured.clear()
            if epoch % 8 == 0:
                sizes.append(live_tensors())
                made.reset(epoch)
    half = len(sizes) // 2
    early, late = sizes[:half], sizes[half:]
    assert max(live.tensors for live in late) <= 1.2 * max(
        live.tensors for live in early
    ), sizes
    assert max(live.bytes for live in late) <= 1.2 * max(
        live.bytes for live in early
    ), sizes
