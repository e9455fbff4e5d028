"""Streams of hosts without a GPU: the stream of each host's work, and its order with other work."""

from contextlib import nullcontext

import pytest
import torch

from esper.core.stage import SeedStage
from esper.training.executor import HostError
from esper.training.host_training import HostTraining
from tests.selection import slow_except
from tests.training.execution.test_streams import growing
from tests.training.fake_gpu import FakeGpu
from tests.training.growing import KINDS, validate
from tests.training.stream_order import Accesses, touch

S = SeedStage


def addresses(training: HostTraining) -> dict[str, int]:
    """The memory that a step and a validation of the host write, by name."""
    assert training.feed is not None
    found = {
        **training.host.state_dict(),
        "alphas": training.alphas,
        "rate": training.rate,
        "totals": training.totals.training,
    }
    found |= {
        "batch": training.feed.x,
        "targets": training.feed.y,
        "order": training.feed.order,
        "position": training.feed.cursor[1],
    }
    return {name: tensor.data_ptr() for name, tensor in found.items()}


@pytest.mark.trap(36)
@pytest.mark.trap(39)
def test_an_env_has_one_stream_for_warming_up_capturing_and_launching() -> None:
    """Epochs and validations, captured and replayed, write the host's memory on that stream."""
    gpu = FakeGpu()
    streams: dict[int, set[object]] = {}

    def work(training: HostTraining) -> None:
        streams.setdefault(training.index, set()).add(gpu.current)

    with growing(gpu) as made:
        for envs in (made.hosts[::-1], made.hosts):
            made.executor.run(work, envs)
            with gpu.watched() as seen:
                made.trainer.epoch(envs)
                made.executor.run(validate, envs)
            for training in envs:
                for address in set(addresses(training).values()) & set(seen.streams):
                    streams[training.index] |= seen.streams[address]
                assert {"batch", "position", "totals"} <= {
                    name
                    for name, address in addresses(training).items()
                    if address in seen.streams
                }
        assert {one.stream for one in gpu.captured} == set.union(*streams.values())
        assert all(one.times for one in gpu.captured[:2])
    assert gpu.streams == 2
    assert [len(mine) for mine in streams.values()] == [1, 1]
    assert len(set.union(*streams.values())) == 2


@pytest.mark.trap(37)
def test_each_env_has_a_memory_of_its_own_also_after_a_drop() -> None:
    gpu = FakeGpu()
    with growing(gpu, n=3) as made:
        for training in made.hosts:
            made.executor.graphs[training.index].limit = 2  # type: ignore[union-attr]
        made.episodes(1, 5)
        pools = {(id(one.pool), one.stream.number) for one in gpu.captured}
    assert len(pools) > 3
    assert len({pool for pool, _ in pools}) == len(pools), (
        "two envs had the same memory"
    )
    assert {stream for _, stream in pools} == {1, 2, 3}


@pytest.mark.trap(39)
def test_forty_one_envs_have_forty_one_streams() -> None:
    gpu = FakeGpu()
    places: dict[int, set[object]] = {}

    def work(training: HostTraining) -> None:
        places.setdefault(training.index, set()).add(gpu.current)

    with growing(gpu, n=41) as made:
        for envs in (made.hosts, made.hosts[::-1], made.hosts[30:]):
            made.executor.run(work, envs)
    assert gpu.streams == 41
    assert all(len(streams) == 1 for streams in places.values())
    assert len(set.union(*places.values())) == 41


@pytest.mark.trap(32)
@pytest.mark.parametrize(
    "error",
    slow_except(
        [None, KeyboardInterrupt], [None, ZeroDivisionError, KeyboardInterrupt]
    ),
)
def test_streams_follow_what_was_queued_and_are_waited_for_even_after_an_error(
    error: type[BaseException] | None,
) -> None:
    """The main stream writes what streams use, before and after them."""
    gpu = FakeGpu()

    def work(training: HostTraining) -> None:
        touch(training.alphas)
        if error is not None:
            raise error

    with growing(gpu) as made, gpu.watched() as seen:
        for _ in range(2):
            for training in made.hosts:
                touch(training.alphas)
            with (
                pytest.raises(HostError if error is ZeroDivisionError else error)
                if error
                else nullcontext()
            ):
                made.executor.run(work, made.hosts)
        for training in made.hosts:
            touch(training.alphas)
        assert seen.pieces >= 8
        made.epoch()
        touch(made.hosts[0].alphas)
        made.epoch()


@pytest.mark.finding("C1")
@pytest.mark.trap(32)
@pytest.mark.parametrize("kind", slow_except(["float images"], KINDS))
def test_no_two_streams_use_the_same_memory_in_no_order(kind: str) -> None:
    """A delay of any stream then changes no bit."""
    gpu = FakeGpu()
    with growing(gpu, kind=kind) as made:
        for i in range(2):
            made.plant(i, made.hosts[i].sites[0].name, S.HOLDING, "norm")
            made.plant(i, made.hosts[i].sites[1].name, S.TRAINING, "norm")
        made.epoch()
        with gpu.watched():
            made.epoch()


def test_work_in_no_order_is_seen() -> None:
    gpu, shared = FakeGpu(), torch.ones(1)
    one, other = gpu.stream(), gpu.stream()
    seen = Accesses(gpu.order, lambda: gpu.current)
    with seen:
        for stream in (one, other):
            with gpu.on(stream):
                touch(shared)
        gpu.join([one, other])
        touch(shared)
        gpu.fork([one])
        with gpu.on(one):
            touch(shared)
        with gpu.on(other):
            touch(shared)
        gpu.synchronize()
        touch(shared)
    assert [race.rpartition("work on ")[2] for race in seen.races] == [
        str(one),
        str(one),
        "None",
    ]
