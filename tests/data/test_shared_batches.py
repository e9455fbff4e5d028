"""Batches for all envs from one loader: rows of each env, workers, and the errors for invalid data."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from esper.data import shared_batches
from esper.data.shared_batches import (
    SharedBatchError,
    SharedBatchIterator,
    worker_died,
)
from esper.data.split import Batch
from esper.data.tinystories import TokenWindows
from esper.telemetry.span import Spans

ROWS, BATCH, STEPS = 40, 3, 4


class Numbers(Dataset[Batch]):
    """Row i is x = [i, 10 i] and y = i; a bad row raises."""

    def __init__(self, bad: int = -1, wide: int = -1, deadly: int = -1) -> None:
        self.bad, self.wide, self.deadly = bad, wide, deadly

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Batch:
        if row == self.bad:
            raise OSError("the disk is gone")
        if row == self.deadly:
            os._exit(3)
        x = torch.tensor([row, 10 * row] + [0] * (row == self.wide))
        return x, torch.tensor(row)


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def order_of(seed: int) -> list[int]:
    """The rows of the first epoch of an env."""
    return torch.randperm(ROWS, generator=generators(seed)[0])[: BATCH * STEPS].tolist()


@contextmanager
def batches(
    dataset: Dataset[Batch], drawn: Sequence[torch.Generator], workers: int = 0
) -> Iterator[SharedBatchIterator]:
    with closing(SharedBatchIterator(dataset, drawn, BATCH, STEPS, workers)) as made:
        yield made


def rows_of(made: SharedBatchIterator, epochs: int = 2) -> list[list[list[int]]]:
    """Rows by env, of each epoch."""
    found = []
    for _ in range(epochs):
        steps = list(made.epoch())
        assert len(steps) == STEPS
        for step in steps:
            for x, y in step:
                assert x.shape == (BATCH, 2)
                assert torch.equal(x[:, 1], 10 * y)
        found.append(
            [
                [row for step in steps for row in step[env][1].tolist()]
                for env in range(len(made.generators))
            ]
        )
    return found


def test_each_env_gets_the_rows_of_its_own_stream() -> None:
    with batches(Numbers(), generators(5, 6)) as made:
        found = rows_of(made)
    for env, seed in enumerate((5, 6)):
        generator = torch.Generator().manual_seed(seed)
        for epoch in found:
            order = torch.randperm(ROWS, generator=generator)
            assert epoch[env] == order[: BATCH * STEPS].tolist()
    assert found[0] != found[1]


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_of_an_env_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    with batches(Numbers(), generators(5, 6)) as made:
        alone = rows_of(made)
    with batches(Numbers(), generators(5, 6), workers) as made:
        assert rows_of(made) == alone


@pytest.mark.finding("G1")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_may_be_written_over_by_its_env(workers: int) -> None:
    """All envs get the same row at once; their tensors share no memory with each other or with the data."""
    table = torch.arange(2.0 * ROWS).view(ROWS, 2)
    data = torch.utils.data.TensorDataset(table, torch.arange(ROWS))
    with batches(data, generators(5, 5), workers) as made:
        for (x, y), (other_x, other_y) in made.epoch():
            expected = y.clone()
            x.fill_(-1)
            y.fill_(-1)
            assert torch.equal(other_x, table[expected])
            assert torch.equal(other_y, expected)
    assert torch.equal(table, torch.arange(2.0 * ROWS).view(ROWS, 2))


def test_the_process_generator_is_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with batches(Numbers(), generators(5), 1) as made:
        rows_of(made)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.finding("M5")
def test_workers_stay_alive_over_epochs() -> None:
    with batches(Numbers(), generators(5, 6), 2) as made:
        pids = []
        for _ in range(3):
            list(made.epoch())
            pids.append(children())
        assert pids[0] == pids[1] == pids[2]
        assert len(pids[0]) == 2
        assert os.getpid() not in pids[0]


def test_waiting_for_data_is_a_phase_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock advances by 3 seconds for each row read."""
    now = [0.0]
    monkeypatch.setattr("esper.telemetry.span.perf_counter", lambda: now[0])

    class Slow(Numbers):
        def __getitem__(self, row: int) -> Batch:
            now[0] += 3.0
            return super().__getitem__(row)

    with batches(Slow(), generators(5, 6)) as made:
        made.spans = Spans()
        with made.spans("train"):
            for _ in made.epoch():
                now[0] += 100.0
    assert made.spans.seconds == {
        "stage": 3.0 * 2 * BATCH * STEPS,
        "train": 100.0 * STEPS,
    }


def children() -> set[int]:
    return {child.pid or 0 for child in multiprocessing.active_children()}


@pytest.mark.parametrize("unfinished", [False, True])
def test_closing_ends_the_workers(unfinished: bool) -> None:
    made = SharedBatchIterator(Numbers(), generators(5), BATCH, STEPS, 2)
    epoch = made.epoch()
    next(epoch)
    next(epoch)
    pids = children()
    assert len(pids) == 2
    if not unfinished:
        list(epoch)
    made.close()
    deadline = time.monotonic() + 30
    while pids & children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not pids & children()
    made.close()
    with pytest.raises(SharedBatchError, match="closed"):
        made.epoch()
    if unfinished:
        with pytest.raises(SharedBatchError, match="over"):
            next(epoch)


def test_an_epoch_that_is_left_is_over_when_the_next_begins() -> None:
    with batches(Numbers(), generators(5)) as made:
        wanted = rows_of(made)
    with batches(Numbers(), generators(5), 2) as made:
        first = made.epoch()
        next(first)
        assert rows_of(made, 1) == wanted[1:]
        with pytest.raises(SharedBatchError, match="newer one has begun"):
            next(first)


@pytest.mark.finding("M18")
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda found: [found[0], shorter(found[1], 1, 0)], "env 1 has 2 inputs and 3"),
        (lambda found: [shorter(found[0], 0, 1), found[1]], "env 0 has 3 inputs and 2"),
        (lambda found: [found[0], shorter(found[1], 1, 1)], "2 targets, not 3 of each"),
    ],
)
def test_a_step_without_one_equal_batch_an_env_raises(
    spoil: Callable[[list[Batch]], list[Batch]],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = shared_batches._Steps.__getitem__

    def spoiled(self: Any, requests: Any) -> Any:
        step = read(self, requests)
        return replace(step, batches=spoil(step.batches))

    monkeypatch.setattr(shared_batches._Steps, "__getitem__", spoiled)
    with (
        batches(Numbers(), generators(5, 6)) as made,
        pytest.raises(SharedBatchError, match=message),
    ):
        list(made.epoch())


def shorter(batch: Batch, inputs: int, targets: int) -> Batch:
    x, y = batch
    return x[inputs:], y[targets:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_row_that_cannot_be_read_is_named(workers: int) -> None:
    bad = next(row for row in order_of(6)[2 * BATCH :] if row not in order_of(5))
    step = order_of(6).index(bad) // BATCH
    words = f"step {step} of 4, env 1, row {bad}: OSError: the disk is gone"
    with (
        batches(Numbers(bad=bad), generators(5, 6), workers) as made,
        pytest.raises(SharedBatchError, match=words),
    ):
        list(made.epoch())


def test_rows_of_unequal_shapes_are_named() -> None:
    with (
        batches(Numbers(wide=order_of(5)[7]), generators(5)) as made,
        pytest.raises(
            SharedBatchError,
            match="step 2 of 4, env 0, putting rows together: RuntimeError",
        ),
    ):
        list(made.epoch())


# torch's signal handler may notice the death once more while the loader is taken down.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_dies_is_reported() -> None:
    """By a SharedBatchError, or by torch's own error, which may come while that is made or while the batches close.

    No error is kept: its frames would keep the loader and its dead worker, of whom torch would tell later.
    """
    told: list[bool] = []
    try:
        with batches(Numbers(deadly=order_of(5)[7]), generators(5), 1) as made:
            try:
                list(made.epoch())
            except RuntimeError as error:
                told.append(isinstance(error, SharedBatchError) or worker_died(error))
        del made
        gc.collect()  # a loader that is left to a later collection tells of the death then
    except RuntimeError as error:
        told.append(worker_died(error))
    assert told
    assert all(told)


@pytest.mark.finding("G1")
def test_batches_for_a_gpu_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch once, in this process; a marked copy stands in for page-locked memory."""
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr(
        "torch.accelerator.current_accelerator", lambda: torch.device("cpu")
    )
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 0)
    monkeypatch.setattr("torch.accelerator.set_device_index", lambda _index: None)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor + 1000)
    with closing(
        SharedBatchIterator(Numbers(), generators(1, 2), BATCH, STEPS, 2, pinned=True)
    ) as made:
        for step in made.epoch():
            for x, y in step:
                assert bool(((x[:, 0] >= 1000) & (x[:, 0] < 1000 + ROWS)).all())
                assert torch.equal(x[:, 0], y)


def test_a_memory_mapped_file_serves_all_envs(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(np.arange(401, dtype="<u2").tobytes())
    data = TokenWindows(tmp_path / "train.bin", 401, 10)
    seen: list[set[int]] = [set(), set()]
    with closing(SharedBatchIterator(data, generators(1, 2), 8, 5, 2)) as made:
        for step in made.epoch():
            for env, (x, y) in enumerate(step):
                assert x.shape == (8, 10)
                assert torch.equal(y, x + 1)
                seen[env] |= set(x[:, 0].tolist())
    assert seen == [set(range(0, 400, 10))] * 2


class Noise(Numbers):
    """Rows that draw from every generator of the process."""

    def __getitem__(self, row: int) -> Batch:
        drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002
        return torch.tensor(drawn), torch.tensor(row)


def test_random_draws_depend_neither_on_workers_nor_on_earlier_reads() -> None:
    """A resumed run, or a repeated epoch, sees the same augmented images."""

    def read(workers: int, seeds: tuple[int, ...], skipped: int = 0) -> list[Tensor]:
        """Returns the batches of the env of seed 1 in its second epoch."""
        made = generators(*seeds)
        for _ in range(skipped):
            for generator in made:
                torch.randperm(ROWS, generator=generator)
        with batches(Noise(), made, workers) as iterator:
            epochs = [
                [step[seeds.index(1)][0].clone() for step in iterator.epoch()]
                for _ in range(2 - skipped)
            ]
        return epochs[-1]

    expected = read(0, (1, 2))
    assert len(torch.cat(expected).unique()) == STEPS * BATCH * 3
    for other in (
        read(0, (1, 2)),
        read(2, (1, 2)),
        read(1, (3, 1)),
        read(0, (1, 2), skipped=1),
    ):
        for one, two in zip(expected, other, strict=True):
            assert torch.equal(one, two)


def test_a_signal_to_the_group_of_the_process_is_not_for_its_workers() -> None:
    """A terminal's Ctrl-C and the SIGTERM of `timeout` reach everything in the group; the step under way is read to
    its end."""
    with batches(Numbers(), generators(0), 2) as iterator:
        reading = iterator.epoch()
        next(reading), next(reading)  # one step of each worker, which has begun then
        pids = children()
        assert len(pids) == 2
        assert os.getpgid(0) not in {os.getpgid(pid) for pid in pids}
        assert len(list(reading)) == STEPS - 2
