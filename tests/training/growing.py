"""Hosts of several kinds that grow at random: the same actions on any executor, recorded to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from esper.config import TrainingConfig
from esper.core.blueprints import BLUEPRINTS, BlueprintRegistry
from esper.core.ramps import STYLES
from esper.core.site import Role, Site
from esper.core.stage import SeedStage
from esper.data.split import Split
from esper.data.task import Augmentation, Task, resolve
from esper.hosts.cnn import CNNHost
from esper.hosts.transformer import TransformerHost
from esper.training.execution.streams import StreamExecutor
from esper.training.executor import Executor
from esper.training.host_state import all_tensors
from esper.training.host_trainer import HostTrainer
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.validate import Configuration, evaluate
from tests.core_helpers import digits, plant
from tests.training.byte_images import byte_digits

BATCHES, BATCH = 6, 8
"""Batches of an epoch: three steps warm a step up, and the others are launched."""

NAMES = {"cnn": ("conv_light", "norm"), "transformer": ("attention", "norm")}
"""Two blueprints without dropout for each topology."""

Record = dict[str, Tensor]


def _small(task: Task) -> Task:
    """A few samples of ``task``, with a validation split whose last part is not full."""

    def first(split: Any, count: int) -> Split:
        return Split(split.x[:count], split.y[:count], split.table)

    validation = first(task.validation, 90)
    return replace(
        task,
        train=first(task.train, 200),
        validation=validation,
        test=validation,
        evaluation_batch=40,
    )


@cache
def float_images() -> Task:
    return _small(digits())


@cache
def byte_images() -> Task:
    """The same as bytes, shifted and mirrored, for a host with fused layers."""
    return _small(byte_digits(augmentation=Augmentation(crop=1, flip=True)))


@cache
def text() -> Task:
    rows = torch.randint(0, 11, (200, 9), generator=torch.Generator().manual_seed(0))
    train, validation = (
        Split(part[:, :-1].contiguous(), part[:, 1:].contiguous())
        for part in (rows[:150], rows[150:])
    )
    return replace(
        float_images(),
        name="text",
        classes=11,
        build_host=lambda: TransformerHost(
            vocabulary=11, width=8, layers=2, heads=2, block=8, slots=2
        ),
        train=train,
        validation=validation,
        test=validation,
        evaluation_batch=20,
    )


@cache
def regression() -> Task:
    """Images whose targets are two numbers, for AdamW with warm-up."""
    task = float_images()

    def with_means(split: Split) -> Split:
        return Split(
            split.x,
            torch.stack([split.x.mean(dim=(1, 2, 3)), split.x[:, 0, 3, 3]], dim=1),
        )

    assert isinstance(task.train, Split)
    validation = with_means(task.validation)
    return replace(
        task,
        classes=None,
        loss="mse",
        optimizer="adamw",
        label_smoothing=0.0,
        warmup_epochs=1.5,
        train=with_means(task.train),
        validation=validation,
        test=validation,
        build_host=lambda: CNNHost(1, 2, base=3, blocks=2, rows=2),
    )


@dataclass(frozen=True)
class Kind:
    """A task, and what of the config matters for what a step does."""

    task: Callable[[], Task]
    precision: str = "float32"
    incubation: str = "shadow"
    micro_batches: int = 1


KINDS = {
    "float images": Kind(float_images),
    "ste": Kind(float_images, incubation="ste"),
    "bytes": Kind(byte_images),
    "bytes in bfloat16, micro-batches": Kind(
        byte_images, precision="bfloat16", micro_batches=2
    ),
    "text": Kind(text),
    "regression by AdamW": Kind(regression),
}


class Dropping(nn.Sequential):
    """A seed with a layer of dropout, which is made the host's own."""

    def __init__(self, channels: int) -> None:
        super().__init__(nn.GroupNorm(1, channels), nn.Dropout(0.3))


class Growing:
    """``n`` hosts of one task in training on ``executor``, which is closed with it."""

    def __init__(
        self,
        kind: Kind,
        executor: Executor,
        n: int = 2,
        device: torch.device | str = "cpu",
        registry: BlueprintRegistry = BLUEPRINTS,
        **task: Any,
    ) -> None:
        self.executor, self.registry = executor, registry
        self.task = kind.task().to(torch.device(device))
        self.config = resolve(_config(kind, n, task), self.task)
        sites = len(self.task.build_host().sites)
        totals = make_metrics(
            n,
            self.task.device,
            2 + sites,
            len(self.task.validation),
            self.task.objective.dtype,
        )
        self.hosts = [
            HostTraining(i, self.task, self.config, totals[i]) for i in range(n)
        ]
        if isinstance(executor, StreamExecutor):
            for training in self.hosts:
                assert training.feed is not None
                training.feed.by_cursor = True
        self.trainer = HostTrainer(self.task, self.hosts, executor)

    def close(self) -> None:
        self.trainer.close()
        self.executor.close()

    def __enter__(self) -> Growing:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def reset(self, episode: int = 0) -> None:
        for training in self.hosts:
            training.reset(7, episode)

    def epoch(self) -> list[Record]:
        """Trains, validates and records."""
        self.trainer.epoch(self.hosts)
        self.validate()
        return [record(training) for training in self.hosts]

    def validate(self) -> None:
        self.executor.run(validate, self.hosts)

    def plant(
        self, number: int, slot: str, stage: SeedStage, blueprint: str = "conv_light"
    ) -> Site:
        """A seed with the role that it has at ``stage``."""
        return plant(
            self.hosts[number], slot, blueprint, stage=stage, registry=self.registry
        )

    def act(self, dice: random.Random) -> None:
        """Executes random actions at some sites of every host."""
        for training in self.hosts:
            for site in training.sites:
                _act(training, site, dice, self.registry)

    def episodes(self, count: int, epochs: int, seed: int = 0) -> list[Record]:
        """Records of all episodes, under random actions of ``seed``."""
        dice, found = random.Random(seed), list[Record]()
        for episode in range(count):
            self.reset(episode)
            for _ in range(epochs):
                self.act(dice)
                found += self.epoch()
        return found


def _config(kind: Kind, n: int, task: dict[str, Any]) -> TrainingConfig:
    sizes = {
        "samples_per_epoch": BATCHES * BATCH,
        "batch_size": BATCH,
        "micro_batches": kind.micro_batches,
    }
    return TrainingConfig.parse(
        {
            "run": {"lanes": 1},
            "task": {
                **sizes,
                "precision": kind.precision,
                "learning_rate": 0.05,
                **task,
            },
            "env": {"n_envs": n, "episode_length": 8, "incubation": kind.incubation},
        }
    )


def _act(
    training: HostTraining, site: Site, dice: random.Random, registry: BlueprintRegistry
) -> None:
    """Plants, incubates, blends, fades, fossilizes or removes the site's seed, or leaves it as it is."""
    roll, blueprint, style = (
        dice.random(),
        dice.choice(NAMES[training.host.topology]),
        dice.choice(list(STYLES)),
    )
    alpha, target = site.alpha, site.target
    match site.role:
        case Role.ABSENT if site.seed is None and roll < 0.5:
            training.plant(
                site,
                registry.at(training.host.topology, site.place, blueprint),
                STYLES[style],
            )
        case Role.ABSENT if site.seed is not None and roll < 0.8:
            training.assign(site, Role.INCUBATING, 0.0, 0.5 + 0.5 * roll, learning=True)
        case Role.INCUBATING if roll < 0.2:
            training.remove(site)
        case Role.INCUBATING if roll < 0.6:
            training.assign(site, Role.BLENDED, target / 2, target, learning=True)
        case Role.BLENDED if not site.learning and roll < 0.4:
            training.remove(site)
        case Role.BLENDED if not site.learning and roll < 0.7:  # alpha holds again
            training.assign(site, Role.BLENDED, alpha, alpha, learning=True)
        case Role.BLENDED if not site.learning or roll < 0.3:  # alpha falls
            training.assign(site, Role.BLENDED, alpha / 2, target, learning=False)
        case Role.BLENDED if roll < 0.8 and alpha < target:  # alpha rises
            training.assign(site, Role.BLENDED, target, target, learning=True)
        case Role.BLENDED if roll < 0.6:
            training.assign(site, Role.FOSSIL, alpha, target, learning=True)
        case _:
            pass


def configurations_of(training: HostTraining) -> list[Configuration]:
    """All off, all on, and each seed off by itself."""
    on = tuple(
        slot.alpha if slot.on else slot.target if slot.incubating else 0.0
        for slot in training.sites
    )
    single = [(*on[:i], 0.0, *on[i + 1 :]) for i in range(len(on))]
    return list(dict.fromkeys([(0.0,) * len(on), on, *single]))


def validate(training: HostTraining) -> None:
    evaluate(
        training,
        training.task.validation,
        configurations_of(training),
        training.totals,
    )


def record(training: HostTraining) -> Record:
    """Copies of all that an epoch leaves behind, in a fixed order."""
    count = len(configurations_of(training))
    found = dict(all_tensors(training))
    stats = training.gradient_stats
    found["gradients"] = stats.total / stats.batches
    found["training"] = training.totals.training
    found["stats"] = training.totals.stats(count)
    found["correct"] = training.totals.correct(count)
    copies = {name: tensor.detach().cpu().clone() for name, tensor in found.items()}
    copies["order"] = training.order.get_state()
    copies["dropout"] = training.dropout.get_state()
    copies["epoch, batch"] = torch.tensor([training.epoch, training.batch])
    return copies


def assert_same(first: Sequence[Record], second: Sequence[Record]) -> None:
    """The same tensors with the same bits, NaN for NaN."""
    assert len(first) == len(second)
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        assert one.keys() == other.keys(), number
        for name, tensor in one.items():
            where = f"record {number}, {name}"
            torch.testing.assert_close(
                tensor, other[name], rtol=0, atol=0, equal_nan=True, msg=where
            )
