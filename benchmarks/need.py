"""Does need say where widening a layer pays?

    python benchmarks/need.py --pairs 40

Hosts of 12 contexts (widths, amounts of data, tasks) train alone, and again with one of their three layers doubled at a
fifth of the epochs (`widen_whole`, ``env.at_once``), on the same batches and from the same weights. Need is measured
just before. Prints, as Markdown, need and the gain in test accuracy by context and slot, and Spearman's rank
correlation of the two over all slots, between contexts and within them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata, spearmanr
from torch import nn

from esper.config import TrainingConfig
from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import STYLES
from esper.core.site import Role
from esper.data.split import Split
from esper.data.task import Task, resolve
from esper.data.tasks import load_task
from esper.hosts.cnn import CNNHost
from esper.hosts.graft import GraftedHost, graft
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from esper.training.native import NativePasses
from esper.training.need import NeedMeter
from esper.training.step import train_epoch
from esper.training.validate import committed_configuration, evaluate

Floats = NDArray[np.float64]

SEED = 8600
GROWS_AT = 0.2
"""Fraction of the epochs after which a layer is doubled."""
SITES = 3


@dataclass(frozen=True)
class Context:
    """A task with hosts of three layers that can be widened."""

    name: str
    task: Task
    epochs: int


def cnn(base: int) -> CNNHost:
    """Makes a CNN of three blocks for 8×8 images."""
    host = CNNHost(1, 10, base=base, blocks=3, pool_last=False)
    host.use_slots(["r2"])
    return host


def mlp(inputs: int, widths: tuple[int, int, int], classes: int) -> GraftedHost:
    """Makes an MLP with three hidden layers."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    sites = {f"r2c{layer}": f"{2 * layer} -> {2 * layer + 2}" for layer in range(SITES)}
    return graft(
        nn.Sequential(*layers, nn.Linear(inputs, classes)), sites, topology="mlp"
    )


def made() -> Task:
    """Makes a task whose labels are those of a random MLP, of 16 numbers that are normally distributed."""
    table = load_task("digits_table")
    draws = torch.Generator().manual_seed(SEED)
    first, second, last = (
        torch.randn(shape, generator=draws) for shape in ((16, 12), (12, 12), (12, 4))
    )
    x = torch.randn((3000, 16), generator=draws)
    y = ((x @ first).relu() @ second).relu() @ last
    y = (y - y.mean(dim=0)).argmax(dim=1)
    splits = {}
    for name, rows in (
        ("train", slice(1000)),
        ("validation", slice(1000, 1400)),
        ("test", slice(1400, 3000)),
    ):
        splits[name] = Split(x[rows].contiguous(), y[rows])
    return replace(table, name="made", classes=4, samples_per_epoch=1000, **splits)


def few(task: Task, samples: int) -> Task:
    """Returns the task with fewer training samples."""
    train = Split(task.train.x[:samples].contiguous(), task.train.y[:samples])
    return replace(task, train=train, samples_per_epoch=samples, batch_size=32)


def contexts() -> Iterator[Context]:
    """Yields the 12 contexts."""
    images, table, drawn = load_task("digits"), load_task("digits_table"), made()

    def of(task: Task, name: str, build: Callable[[], nn.Module], epochs: int) -> Context:
        task = replace(task, build_host=build, slots=None)
        return Context(f"{task.name}, {name}", task, epochs)

    for base in (2, 3, 6):
        yield of(images, f"blocks of {base}, {2 * base}, {4 * base}", lambda b=base: cnn(b), 30)
    yield of(few(images, 250), "blocks of 3, 6, 12, 250 images", lambda: cnn(3), 60)
    for widths in ((3, 3, 3), (8, 8, 8), (24, 24, 24), (16, 3, 16)):
        yield of(table, f"layers of {widths}", lambda w=widths: mlp(64, w, 10), 30)
    yield of(few(table, 250), "layers of (8, 8, 8), 250 rows", lambda: mlp(64, (8, 8, 8), 10), 60)
    for widths in ((3, 3, 3), (16, 16, 16), (3, 16, 16)):
        yield of(drawn, f"layers of {widths}", lambda w=widths: mlp(16, w, 4), 30)


def start(context: Context) -> HostTraining:
    """Makes a host in training."""
    tables = {
        "task": {"name": "digits"},
        "env": {"episode_length": context.epochs, "at_once": True},
    }
    config = resolve(TrainingConfig.parse(tables), context.task)
    totals = make_metrics(
        1, torch.device("cpu"), 1 + SITES, len(context.task.validation)
    )
    training = HostTraining(0, context.task, config, totals[0])
    training.native = NativePasses(training)
    return training


def final(training: HostTraining, epochs: int) -> tuple[float, float]:
    """Trains to the end; returns test accuracy, pp, and loss."""
    while training.epoch < epochs:
        train_epoch(training)
    result = evaluate(training, training.task.test, [committed_configuration(training)])
    return float(result.accuracy[0]), float(result.loss[0])


def measured(context: Context, pairs: int) -> tuple[Floats, Floats]:
    """Returns need by host and site, and what doubling that layer adds to test accuracy, pp; [pairs, sites] each."""
    training = start(context)
    meter = NeedMeter(training)
    needs = np.zeros((pairs, SITES))
    gains = np.zeros((pairs, SITES))
    at = round(GROWS_AT * context.epochs)
    for pair in range(pairs):
        alone = 0.0
        for widened in range(-1, SITES):
            training.reset(SEED + pair, 0)
            while training.epoch < at:
                train_epoch(training)
            if widened < 0:
                meter.measure()
                needs[pair] = meter.values.numpy()
                alone, _ = final(training, context.epochs)
                continue
            site = training.sites[widened]
            recipe = BLUEPRINTS.at(training.host.topology, site.place, "widen_whole")
            training.plant(site, recipe, STYLES["LINEAR_ADD"])
            training.assign(site, Role.FOSSIL, 1.0, 1.0, learning=True)
            gains[pair, widened] = final(training, context.epochs)[0] - alone
    return needs, gains
