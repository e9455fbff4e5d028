"""Batches from data in memory: their order, augmentation, and buffers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from esper.data.split import Split
from esper.data.task import Augmentation
from esper.training.batches import BatchLoader
from tests.data.byte_images import colours, looked_up

# Batches


def feed_of(
    split: Split,
    batch: int,
    augmentation: Augmentation,
    seed: int = 5,
    episode: int = 0,
) -> BatchLoader:
    feed = BatchLoader(split, batch, 36, augmentation, torch.float32)
    feed.restart(seed, episode)
    return feed


def batches_of(feed: BatchLoader, epoch: int, order: int = 1) -> dict[int, Tensor]:
    """The image of each sample of an epoch, by its row in the split."""
    feed.shuffle(epoch, torch.Generator().manual_seed(order))
    found: dict[int, Tensor] = {}
    for number in range(feed.batches):
        x, y = feed.batch(number)
        rows = feed.order[number * feed.batch_size :][: feed.batch_size]
        assert torch.equal(y, feed.split.y[rows])
        found |= {int(row): image.clone() for row, image in zip(rows, x, strict=True)}
    return found


def test_batches_without_augmentation_are_the_pixels_through_the_table() -> None:
    split = colours()
    feed = feed_of(split, 12, Augmentation())
    place = feed.x.data_ptr()
    for row, image in batches_of(feed, 0).items():
        assert torch.equal(image, looked_up(split, torch.tensor([row]))[0])
    assert feed.x.data_ptr() == place  # every batch is put into the same buffer
    assert feed.x.is_contiguous(memory_format=torch.channels_last)


def same_images(first: dict[int, Tensor], second: dict[int, Tensor]) -> bool:
    both = first.keys() & second.keys()
    assert len(both) > 25
    return all(torch.equal(first[row], second[row]) for row in both)


def test_draws_depend_only_on_seed_episode_epoch_and_sample() -> None:
    both, split = Augmentation(crop=2, flip=True), colours()
    wanted = batches_of(feed_of(split, 12, both), 3)
    assert same_images(
        wanted, batches_of(feed_of(split, 4, both), 3)
    )  # not on the size of a batch
    assert same_images(
        wanted, batches_of(feed_of(split, 9, both), 3, order=2)
    )  # nor on the place in it
    assert not same_images(wanted, batches_of(feed_of(split, 12, both), 4))
    assert not same_images(wanted, batches_of(feed_of(split, 12, both, episode=1), 3))
    assert not same_images(wanted, batches_of(feed_of(split, 12, both, seed=9), 3))


@pytest.mark.parametrize("by_cursor", [False, True])
def test_batches_are_the_windows_in_the_order_drawn(by_cursor: bool) -> None:
    split = Split.of_text(torch.arange(100, 131), 3).to(torch.device("cpu"))
    assert split.text is not None
    loader = BatchLoader(split, 4, 8, Augmentation(), torch.float32)
    loader.by_cursor = by_cursor  # as on a GPU
    loader.shuffle(0, torch.Generator().manual_seed(1))
    assert loader.order.tolist() != sorted(loader.order.tolist())
    for number in range(2):
        x, y = loader.batch(number)
        rows = loader.order[4 * number : 4 * number + 4]
        assert torch.equal(x, split.x[rows])
        assert torch.equal(y, x + 1)
