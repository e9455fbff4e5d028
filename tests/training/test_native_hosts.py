"""The hosts of the built-in tasks in compiled code beside PyTorch, with every blueprint that the tasks offer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import STYLES
from esper.core.stage import SeedStage as S
from esper.data.images import PRESETS, mnist5k_host, normalised
from esper.data.objective import PAD
from esper.data.split import Split
from esper.data.task import Augmentation, Task, resolve
from esper.data.tasks import load_task
from esper.hosts.transformer import TransformerHost
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.step import train_epoch
from tests.core_helpers import plant, tiny_config
from tests.selection import slow_except
from tests.training.native_pairs import (
    both,
    check_alike,
    check_validation,
    doubled,
    share_apart,
    take_over,
    trained,
)

STAGES = (S.TRAINING, S.BLENDING, S.FOSSILIZED)
INCUBATIONS = ("shadow", "ste")
OPTIMIZERS = ("sgd", "adamw")
BATCH = 17
"""Samples of a batch: a group of 16 and one more."""
BATCHES = 3
RATES = {"sgd": 0.05, "adamw": 0.01}


def images(name: str) -> Task:
    """The hosts and the data's form of an image task, with noise for images: no two pixels are equal for long."""
    numbers = np.random.default_rng(0)
    splits = []
    for count in (BATCHES * BATCH, 37, 20):
        x = numbers.integers(0, 256, (count, 28, 28, 1), dtype=np.uint8)
        splits.append(Split(torch.from_numpy(x), torch.arange(count) % 10))
    train, validation, test = normalised(*splits)
    task = Task(
        name,
        10,
        mnist5k_host,
        train,
        validation,
        test,
        augmentation=Augmentation(crop=2),
        weight_decay=0.3,
        label_smoothing=0.1,
        evaluation_batch=20,
    )
    if name == "mnist5k":
        return task
    (preset,) = [preset for preset in PRESETS if preset.name == name]
    settings = {**preset.settings, "samples_per_epoch": None}
    return replace(task, build_host=preset.build_host, **settings)


def text() -> Task:
    """A small host of the kind that `chars` and `code` have; 19 tokens a sequence, of which some have no target."""
    tokens = torch.randint(0, 11, (1500,), generator=torch.Generator().manual_seed(0))
    splits = []
    for part in tokens.split([1100, 200, 200]):
        whole = Split.of_text(part, 19)
        y = whole.y.clone()
        y[::3, 5:] = PAD
        splits.append(Split(whole.x, y))
    return Task(
        "chars",
        11,
        lambda: TransformerHost(11, width=16, layers=2, heads=4, block=24, slots=2),
        *splits,
        evaluation_batch=7,
        weight_decay=0.1,
    )


@cache
def task_of(name: str) -> Task:
    if name == "chars":
        return text()
    if name == "digits_table":
        return replace(load_task(name), evaluation_batch=150)
    return images(name)


@dataclass
class Case:
    """Seeds of one host: slot, blueprint and style."""

    name: str
    number: int
    seeds: dict[str, tuple[str, str]]

    @property
    def incubation(self) -> str:
        return INCUBATIONS[self.number % 2]

    @property
    def optimizer(self) -> str:
        return OPTIMIZERS[self.number // 2 % 2]

    def stage(self, place: int) -> S:
        return STAGES[(self.number + place) % len(STAGES)]

    def training(self, batches: int) -> HostTraining:
        """A host with the seeds, at stages in turn."""
        task = task_of(self.name)
        config = tiny_config(
            task={
                "batch_size": BATCH,
                "samples_per_epoch": batches * BATCH,
                "optimizer": self.optimizer,
                "learning_rate": RATES[self.optimizer],
                "precision": "float32",
            },
            env={"slots": ["all"], "incubation": self.incubation},
        )
        metrics = make_metrics(1, torch.device("cpu"))[0]
        training = HostTraining(0, task, resolve(config, task), metrics)
        training.reset(0, 0)
        for place, (slot, (blueprint, style)) in enumerate(self.seeds.items()):
            plant(training, slot, blueprint, style, self.stage(place), target=0.6)
        return training

    def __str__(self) -> str:
        seeds = [
            f"{slot} {blueprint} {style}"
            for slot, (blueprint, style) in self.seeds.items()
        ]
        return " ".join([self.name, self.optimizer, self.incubation, *seeds])


def offered(name: str) -> Iterator[tuple[list[str], str, str]]:
    """Every blueprint of a task in every style, with the slots at which it is offered."""
    host = task_of(name).new_host(["all"])
    slots: dict[str, list[str]] = {}
    for place in host.sites:
        for blueprint in BLUEPRINTS.fitting(host.topology, place):
            slots.setdefault(blueprint, []).append(place.name)
    for blueprint, style in product(slots, STYLES):
        added = BLUEPRINTS.get(host.topology, blueprint).only_added
        if not added or style.endswith("ADD"):
            yield slots[blueprint], blueprint, style


def cases(name: str) -> list[Case]:
    """Hosts with up to three seeds each, which together have all that is offered."""
    made: list[Case] = []
    for number, (slots, blueprint, style) in enumerate(offered(name)):
        slot = slots[number % len(slots)]
        room = [case for case in made if len(case.seeds) < 3 and slot not in case.seeds]
        if not room:
            room = [Case(name, len(made), {})]
            made += room
        room[0].seeds[slot] = blueprint, style
    return made


ALL = [
    case
    for name in ("mnist5k", "fashion_mnist", "digits_table", "chars")
    for case in cases(name)
]


IN_FLOAT64 = ALL[::3]
"""Hosts that the default suite trains in float64; the others it trains in float32."""


@pytest.mark.parametrize("case", slow_except(IN_FLOAT64, ALL), ids=str)
def test_epochs_in_float64_are_those_of_pytorch_to_the_ninth_digit(case: Case) -> None:
    eager, native = trained(lambda: doubled(case.training(BATCHES)), 2)
    check_alike(eager, native, 1e-9, zeros=case.name != "chars")
    check_validation(eager, native, 1e-9)


@pytest.mark.parametrize(
    "case",
    slow_except([case for case in ALL if case not in IN_FLOAT64], ALL),
    ids=str,
)
def test_a_step_in_float32_is_that_of_pytorch_to_the_fifth_digit(case: Case) -> None:
    """Rounding decides a ReLU of a number near 0, and the sign of a first step of AdamW."""
    eager, native = both(lambda: case.training(1))
    for _ in range(BATCHES):
        train_epoch(eager)
        train_epoch(native)
        share, most = share_apart(eager, native, 1e-5)
        assert share < 0.002
        assert most < 2.1 * RATES["adamw"]
        take_over(native, eager)
    check_validation(eager, native)
