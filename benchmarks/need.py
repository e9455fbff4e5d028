"""Does need say where widening a layer pays?

    python benchmarks/need.py --pairs 40

Hosts of 12 contexts (widths, amounts of data, tasks) train alone, and again with one of their three layers doubled at a
fifth of the epochs (`widen_whole`, ``env.at_once``), on the same batches and from the same weights. Need is measured
just before. Prints, as Markdown, need and the gain in test accuracy by context and layer, and Spearman's rank
correlation of the two over all layers, of the means of contexts, and within contexts. Among several measures, need was
the best on 12 contexts (`chosen`); 12 others (`fresh`) show whether that holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

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
"""Of the made tasks."""
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


def made(inputs: int, hidden: int, classes: int) -> Task:
    """Makes a task whose labels are those of a random MLP, of numbers that are normally distributed."""
    draws = torch.Generator().manual_seed(SEED)
    shapes = ((inputs, hidden), (hidden, hidden), (hidden, classes))
    first, second, last = (torch.randn(shape, generator=draws) for shape in shapes)
    x = torch.randn((3000, inputs), generator=draws)
    y = ((x @ first).relu() @ second).relu() @ last
    y = (y - y.mean(dim=0)).argmax(dim=1)
    splits = {}
    for name, rows in (
        ("train", slice(1000)),
        ("validation", slice(1000, 1400)),
        ("test", slice(1400, 3000)),
    ):
        splits[name] = Split(x[rows].contiguous(), y[rows])
    return replace(
        load_task("digits_table"),
        name=f"made of {inputs}",
        classes=classes,
        samples_per_epoch=1000,
        **splits,
    )


def few(task: Task, samples: int) -> Task:
    """Returns the task with fewer training samples."""
    train = Split(task.train.x[:samples].contiguous(), task.train.y[:samples])
    return replace(
        task,
        name=f"{task.name}, {samples} samples",
        train=train,
        samples_per_epoch=samples,
        batch_size=32,
    )


def contexts(which: str) -> Iterator[Context]:
    """Yields the 12 contexts that need was ``chosen`` on, or 12 ``fresh`` ones."""
    fresh = which == "fresh"
    images, table = load_task("digits"), load_task("digits_table")
    drawn = made(20, 20, 6) if fresh else made(16, 12, 4)
    bases = ((images, (1, 4, 8)), (few(images, 250), (2,)))
    widths = (
        (table, ((5, 5, 5), (12, 12, 12), (4, 16, 4), (32, 4, 32))),
        (few(table, 500), ((12, 12, 12),)),
        (drawn, ((4, 4, 4), (20, 20, 20), (20, 4, 20))),
    )
    if not fresh:
        bases = ((images, (2, 3, 6)), (few(images, 250), (3,)))
        widths = (
            (table, ((3, 3, 3), (8, 8, 8), (24, 24, 24), (16, 3, 16))),
            (few(table, 250), ((8, 8, 8),)),
            (drawn, ((3, 3, 3), (16, 16, 16), (3, 16, 16))),
        )

    def of(
        task: Task, shape: tuple[int, ...], build: Callable[[], nn.Module]
    ) -> Context:
        epochs = 30 if task.samples_per_epoch > 500 else 60
        name = f"{task.name}: {', '.join(map(str, shape))}"
        return Context(name, replace(task, build_host=build, slots=None), epochs)

    for task, of_task in bases:
        for base in of_task:
            yield of(task, (base, 2 * base, 4 * base), partial(cnn, base))
    for task, of_task in widths:
        inputs = task.train.x.shape[1]
        for shape in of_task:
            yield of(task, shape, partial(mlp, inputs, shape, task.classes))


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


def final(training: HostTraining, epochs: int) -> float:
    """Trains to the end; returns the test accuracy, pp."""
    while training.epoch < epochs:
        train_epoch(training)
    result = evaluate(training, training.task.test, [committed_configuration(training)])
    return float(result.accuracy[0])


def measured(context: Context, pairs: int, seed: int) -> tuple[Floats, Floats, Floats]:
    """Returns need, and what doubling that layer adds to test accuracy, pp; [pairs, sites] each, and losses [pairs]."""
    training = start(context)
    meter = NeedMeter(training)
    needs = np.full((pairs, SITES), np.nan)
    gains = np.zeros((pairs, SITES))
    losses = np.zeros(pairs)
    at = round(GROWS_AT * context.epochs)
    for pair in range(pairs):
        alone = 0.0
        for widened in range(-1, SITES):
            training.reset(seed + pair, 0)
            while training.epoch < at:
                train_epoch(training)
            if widened < 0:
                meter.measure()
                needs[pair] = meter.values.numpy()
                totals = training.totals.training
                losses[pair] = float(totals[0] / totals[2])
                alone = final(training, context.epochs)
                continue
            site = training.sites[widened]
            recipe = BLUEPRINTS.at(training.host.topology, site.place, "widen_whole")
            training.plant(site, recipe, STYLES["LINEAR_ADD"])
            training.assign(site, Role.FOSSIL, 1.0, 1.0, learning=True)
            gains[pair, widened] = final(training, context.epochs) - alone
    return needs, gains, losses


def correlations(scores: list[Floats], gains: list[Floats]) -> str:
    """Returns Spearman's rank correlation over all slots, of the means of contexts, and within contexts."""
    everywhere = spearmanr(np.concatenate(scores), np.concatenate(gains))[0]
    between = spearmanr([s.mean() for s in scores], [g.mean() for g in gains])[0]
    ranks = [
        np.concatenate([rankdata(v) for v in values]) for values in (scores, gains)
    ]
    within = "-"
    if np.ptp(ranks[0]) > 0:
        within = f"{np.corrcoef(*ranks)[0, 1]:.2f}"
    return f"{everywhere:.2f} | {between:.2f} | {within}"


def main() -> None:
    """Measure both sets of contexts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=9700)
    parser.add_argument("--contexts", choices=("chosen", "fresh"), action="append")
    options = parser.parse_args()
    for which in options.contexts or ("chosen", "fresh"):
        print(f"\n{options.pairs} hosts of each of 12 contexts, {which}:\n")
        print(
            "| context | need of each layer | gain of doubling it, pp | standard error |"
        )
        print("|---|---|---|---|", flush=True)
        scores: dict[str, list[Floats]] = {
            "need": [],
            "loss alone": [],
            "need / loss": [],
        }
        means = []
        for context in contexts(which):
            needs, gains, losses = measured(context, options.pairs, options.seed)
            need, gain = np.nanmean(needs, axis=0), gains.mean(axis=0)
            error = gains.std(axis=0, ddof=1) / np.sqrt(options.pairs)
            columns = [
                ", ".join(f"{v:.2f}" for v in row) for row in (need, gain, error)
            ]
            print(f"| {context.name} | {' | '.join(columns)} |", flush=True)
            loss = np.full(SITES, losses.mean())
            scores["need"].append(need)
            scores["loss alone"].append(loss)
            scores["need / loss"].append(need / loss)
            means.append(gain)
        print("\n| rank correlation with the gain | all | between contexts | within |")
        print("|---|---|---|---|")
        for name, of_score in scores.items():
            print(f"| {name} | {correlations(of_score, means)} |", flush=True)


if __name__ == "__main__":
    main()
