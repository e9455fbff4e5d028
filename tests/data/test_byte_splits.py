"""Images stored in memory as bytes: lookup, augmentation, and runs on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from esper.config import ConfigError, TrainingConfig
from esper.data.split import Split
from esper.data.task import Augmentation
from esper.env.vector_env import GrowthVectorEnv
from esper.ops import normalisation_table
from esper.run.experiment import Experiment
from esper.training.batches import BatchLoader
from esper.training.execution.workers import WorkerExecutor
from esper.training.host_trainer import HostTrainer
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from tests.core_helpers import plant, same_bits, tensors_of, tiny_config
from tests.run.run_helpers import Does, same_results, same_run, stop, within_round
from tests.training.byte_images import byte_digits
from tests.training.test_foreign_hosts import training_of

CPU = torch.device("cpu")


def colours(count: int = 40, side: int = 6) -> Split:
    """Random images of three channels, each normalised by its own numbers."""
    generator = torch.Generator().manual_seed(count)
    x = torch.randint(256, (count, side, side, 3), generator=generator, dtype=torch.uint8)
    y = torch.randint(10, (count,), generator=generator)
    return Split(x, y, normalisation_table([0.2, 0.4, 0.6], [0.1, 0.2, 0.3]))


def looked_up(split: Split, rows: Tensor) -> Tensor:
    """Pixels through the table, one channel at a time: float32 [B, C, H, W]."""
    assert split.table is not None
    return torch.stack([split.table[c][split.x[rows][..., c].long()] for c in range(split.x.shape[-1])], dim=1)


def test_networks_see_each_pixel_through_the_table_of_its_channel() -> None:
    split = colours()
    seen = split.inputs(3, 20)
    assert torch.equal(seen, looked_up(split, torch.arange(3, 20)))
    assert seen.dtype == torch.float32
    assert seen.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(split.inputs(3, 20, torch.bfloat16), seen.bfloat16())
    assert split.inputs(35, 100).shape == (5, 3, 6, 6)  # as a slice ends where the data does
    values = (split.x[0, 0, 0].double() / 255 - torch.tensor([0.2, 0.4, 0.6])) / torch.tensor([0.1, 0.2, 0.3])
    torch.testing.assert_close(split.inputs(0, 1)[0, :, 0, 0], values.float())


def test_inputs_other_than_bytes_are_returned_unchanged() -> None:
    x = torch.randn(5, 3)
    split = Split(x, torch.zeros(5, dtype=torch.int64))
    assert torch.equal(split.inputs(1, 9, torch.bfloat16), x[1:])
    assert split.empty(2, torch.bfloat16).dtype == torch.float32


def test_a_split_moves_with_its_table() -> None:
    split = colours().to(torch.device("meta"))
    assert split.table is not None
    assert {tensor.device.type for tensor in (split.x, split.y, split.table)} == {"meta"}
    plain = Split(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)).to(CPU)
    assert plain.table is None


def changed(**fields: Tensor) -> Split:
    split = colours(4)
    return Split(**{"x": split.x, "y": split.y, "table": split.table, **fields})  # type: ignore[arg-type]


GOOD = colours(4)
WRONG = {
    "float32 pixels": (changed(x=GOOD.x.float()), r"inputs are uint8 \[N, H, W, C\] .*; not torch.float32 of shape"),
    "no channels": (changed(x=GOOD.x[..., 0]), r"not torch.uint8 of shape \(4, 6, 6\)"),
    "text": (changed(y=torch.zeros(4, 2, dtype=torch.int64)), r"targets \[N\]; not .* and \(4, 2\)"),
    "table of one channel": (changed(table=torch.zeros(1, 256)), r"of shape \(1, 256\); images of 3 channels need"),
    "table of float64": (changed(table=torch.zeros(3, 256).double()), "see esper.ops.normalisation_table"),
    "channels first": (changed(x=torch.zeros(4, 3, 32, 32, dtype=torch.uint8)), r"images of 32 channels need"),
    "permuted": (
        changed(x=torch.zeros(4, 3, 6, 6, dtype=torch.uint8).permute(0, 2, 3, 1)),
        r"inputs must be contiguous; call .contiguous\(\) after a permute",
    ),
    "every other target": (changed(y=torch.zeros(8, dtype=torch.int64)[::2]), "targets must be contiguous"),
    "table transposed": (changed(table=torch.zeros(256, 3).t()), "the table must be contiguous"),
    "too many channels": (
        changed(x=torch.zeros(4, 2, 2, 33, dtype=torch.uint8), table=torch.zeros(33, 256)),
        "1 to 32 channels and some pixels",
    ),
    "no pixels": (changed(x=torch.zeros(4, 0, 6, 3, dtype=torch.uint8)), "some pixels"),
}


@pytest.mark.parametrize("what", WRONG)
def test_bytes_that_cannot_be_staged_are_refused(what: str) -> None:
    split, words = WRONG[what]
    with pytest.raises(ConfigError, match=f"mine, train split: .*{words}"):
        split.check("mine, train split", 10)
    GOOD.check("good", 10)


@pytest.mark.parametrize(
    ("augmentation", "words"),
    [
        (Augmentation(crop=8), "crop is 8; for images of this size it must be 0 to 7 pixels"),
        (Augmentation(crop=-1), "crop is -1"),
    ],
)
def test_an_impossible_crop_is_refused(augmentation: Augmentation, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        byte_digits(augmentation=augmentation)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """What networks see of the byte digits, as a dataset to stream."""

    def __init__(self) -> None:
        split = byte_digits().train
        assert isinstance(split, Split)
        self.x, self.y = split.inputs(0, len(split)).contiguous(), split.y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row], self.y[row]


def test_augmentation_is_refused_unless_images_are_bytes() -> None:
    base = byte_digits()
    rows = Rows()
    for train in (Split(rows.x, rows.y), rows):
        with pytest.raises(ConfigError, match="augmentation needs uint8 training images with a table"):
            replace(base, train=train, augmentation=Augmentation(flip=True))


# Batches


def feed_of(split: Split, batch: int, augmentation: Augmentation, seed: int = 5, episode: int = 0) -> BatchLoader:
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
    assert same_images(wanted, batches_of(feed_of(split, 4, both), 3))  # not on the size of a batch
    assert same_images(wanted, batches_of(feed_of(split, 9, both), 3, order=2))  # nor on the place in it
    assert not same_images(wanted, batches_of(feed_of(split, 12, both), 4))
    assert not same_images(wanted, batches_of(feed_of(split, 12, both, episode=1), 3))
    assert not same_images(wanted, batches_of(feed_of(split, 12, both, seed=9), 3))


def test_images_are_really_mirrored_and_cropped_each_in_its_own_way() -> None:
    split = colours()
    plain = batches_of(feed_of(split, 12, Augmentation()), 0)
    mirrored = batches_of(feed_of(split, 12, Augmentation(flip=True)), 0)
    flipped = [bool(torch.equal(mirrored[row], image.flip(-1))) for row, image in plain.items()]
    kept = [bool(torch.equal(mirrored[row], image)) for row, image in plain.items()]
    assert all(a != b for a, b in zip(flipped, kept, strict=True))
    assert 8 < sum(flipped) < 28
    assert split.table is not None
    black = split.table[:, 0]
    places = set()
    for row, image in batches_of(feed_of(split, 12, Augmentation(crop=1)), 0).items():
        padded = black[:, None, None].expand(3, 8, 8).clone()
        padded[:, 1:-1, 1:-1] = plain[row]
        windows = {(i, j): padded[:, i : i + 6, j : j + 6] for i in range(3) for j in range(3)}
        (found,) = [place for place, window in windows.items() if torch.equal(window, image)]
        places.add(found)
    assert len(places) > 5


def trained(task_values: dict[str, object], lanes: int, batch: int = 32) -> list[HostTraining]:
    task = byte_digits(**task_values)
    envs = [training_of(task, index=index, task={"batch_size": batch}) for index in range(3)]
    with WorkerExecutor(lanes) as pool:
        trainer = HostTrainer(task, envs, pool)
        for _ in range(2):
            trainer.epoch(envs)
    return envs


def test_augmented_hosts_are_the_same_for_any_number_of_workers_and_not_those_of_plain_images() -> None:
    augmented = {"augmentation": Augmentation(crop=1, flip=True)}
    one, three, plain = trained(augmented, 1), trained(augmented, 3), trained({}, 1)
    for a, b, c in zip(one, three, plain, strict=True):
        same_bits(tensors_of(a), tensors_of(b))
        assert not torch.equal(tensors_of(a)["host.parameter.0"], tensors_of(c)["host.parameter.0"])


def test_validation_and_calibration_see_images_as_they_are() -> None:
    task = byte_digits(augmentation=Augmentation(crop=3, flip=True))
    assert isinstance(task.train, Split)
    assert torch.equal(task.sample, looked_up(task.validation, torch.arange(3)))
    assert torch.equal(task.calibration_inputs(), looked_up(task.train, torch.arange(256)))
    assert torch.equal(task.calibration_inputs(5), looked_up(task.train, torch.arange(5)))


def test_streamed_images_train_the_hosts_that_bytes_in_memory_do() -> None:
    found = []
    for task in (byte_digits(), replace(byte_digits(), train=Rows(), workers=0)):
        config = training_of(byte_digits()).config
        env = HostTraining(0, task, config, make_metrics(1, CPU)[0])
        env.reset(0, 0)
        plant(env, "r0c0")
        with WorkerExecutor(1) as pool:
            trainer = HostTrainer(task, [env], pool)
            trainer.epoch([env])
            trainer.close()
        found.append(tensors_of(env, ("r0c0",)) | {"totals": env.totals.training.clone()})
    for name, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][name], rtol=1e-4, atol=1e-6)


# Runs

FILE = """
from esper.data.task import Augmentation
from tests.training.byte_images import byte_digits


def make_task():
    return byte_digits(augmentation=Augmentation(crop=1), precision="bfloat16", n_envs=2)
"""


@pytest.mark.trap(30)
def test_a_run_on_bytes_resumes_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    name = f"{tmp_path / 'mine.py'}:make_task"
    config = TrainingConfig.parse(
        {
            "run": {"rounds": 2, "controller": "random", "seed": 3},
            "task": {"name": name, "samples_per_epoch": 128, "micro_batches": 2},
            "env": {"episode_length": 5, "baseline_episodes": 1, "recalibrate": True},
        }
    )
    whole = Experiment(config, tmp_path / "whole").run()
    sink = Does(within_round(2), stop)
    Experiment(config, tmp_path / "cut", [sink]).run()
    again = Experiment.resume(tmp_path / "cut", task=name).run()
    same_run(tmp_path / "cut", tmp_path / "whole")
    same_results(again, whole)


def test_an_env_of_bytes_is_the_same_for_any_number_of_workers() -> None:
    """With counterfactuals that are calibrated on staged images."""
    found = []
    for lanes in (1, 3):
        config = tiny_config(3, 4, run={"lanes": lanes}, env={"recalibrate": True})
        env = GrowthVectorEnv(byte_digits(augmentation=Augmentation(crop=1)), config)
        try:
            env.reset(seed=4)
            for _ in range(3):
                env.action_space.seed(1)
                observation = env.step(env.action_space.sample() * 0)[0]
            found.append((torch.as_tensor(observation), env.training[0].totals.accumulators.read().block))
        finally:
            env.close()
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
