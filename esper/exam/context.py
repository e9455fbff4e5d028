"""Contexts: hosts that differ in data, width, length, rate and price, and the task of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from esper.config import Optimizer
from esper.core.arrays import Floats, Ints
from esper.core.sizing import FACTORS
from esper.data.split import Split
from esper.data.task import Task
from esper.exam.sources import Source, load_source
from esper.hosts.cnn import CNNHost
from esper.hosts.graft import GraftedHost, graft

VALIDATION = 150
MOST_TEST = 1_000
BATCH = 32
RATES = {
    ("cnn", "sgd"): 0.4,
    ("cnn", "adamw"): 0.06,
    ("mlp", "sgd"): 0.2,
    ("mlp", "adamw"): 0.03,
}
"""Learning rates that are best for hosts alone, of those that double."""
WIDEST = {"cnn": 32, "mlp": 128}
"""Max units of the first layer."""


@dataclass(frozen=True)
class Context:
    """All that sets an episode apart from others, but for its random numbers."""

    source: str
    """Name of its data."""
    width: int
    """Channels of the first of two blocks, the second has twice as many; or units of both hidden layers."""
    samples: int
    """Training samples."""
    epochs: int
    price: float
    """Gain that a doubling of the parameters must bring, pp."""
    noise: float = 0.0
    """Share of training labels that are drawn anew."""
    optimizer: Optimizer = "adamw"
    rate: float = 1.0
    """Learning rate in units of the one that is best for the host alone."""
    key: int = 0
    """Seed of its rows and weights."""

    @property
    def topology(self) -> str:
        return "cnn" if load_source(self.source).images else "mlp"

    @property
    def learning_rate(self) -> float:
        return RATES[self.topology, self.optimizer] * self.rate

    @property
    def batch_size(self) -> int:
        return min(BATCH, self.samples)

    @property
    def factors(self) -> tuple[int, ...]:
        """The multiples of the widths that are not too wide."""
        widest = WIDEST[self.topology]
        return tuple(factor for factor in FACTORS if self.width * factor <= widest)

    def parameters(
        self,
        factor: int = 1,
    ) -> int:
        """Returns the number of parameters of the host at a multiple of its widths."""
        source = load_source(self.source)
        width = self.width * factor
        classes = source.classes
        inputs = int(source.x.shape[1])
        if source.images:
            norms = 2 * width + 4 * width
            return 9 * width + 18 * width**2 + norms + 2 * width * classes + classes
        return (inputs + 1) * width + (width + 1) * width + (width + 1) * classes


@dataclass(frozen=True)
class Region:
    """Contexts that a policy is not trained on."""

    widths: tuple[int, ...] = (4, 5)
    samples: tuple[int, int] = (200, 300)
    epochs: tuple[int, int] = (10, 14)

    def touches(self, context: Context) -> bool:
        return (
            context.width in self.widths
            or self.samples[0] <= context.samples <= self.samples[1]
            or self.epochs[0] <= context.epochs <= self.epochs[1]
        )


REGION = Region()


@dataclass(frozen=True)
class Law:
    """The ranges that contexts are drawn from."""

    sources: tuple[str, ...]
    cnn_widths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 12)
    mlp_widths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)
    cnn_epochs: tuple[int, int] = (5, 24)
    mlp_epochs: tuple[int, int] = (5, 40)
    samples: tuple[int, int] = (40, 800)
    prices: tuple[float, float] = (0.4, 8.0)
    noises: tuple[float, ...] = (0.0, 0.0, 0.15, 0.3)
    varied_rates: float = 0.5
    """Share of contexts whose rate is drawn between 1/8 and 2; that of the others is 1."""
    left_out: Region | None = REGION
    """No context has a width, a number of samples or of epochs of this region."""

    def draw(self, rng: np.random.Generator) -> Context:
        """Draws one context."""
        while True:
            context = self._draw(rng)
            if self.left_out is None or not self.left_out.touches(context):
                return context

    def _draw(self, rng: np.random.Generator) -> Context:
        name = str(rng.choice(_array_of(self.sources)))
        source = load_source(name)
        widths, epochs = self.mlp_widths, self.mlp_epochs
        if source.images:
            widths, epochs = self.cnn_widths, self.cnn_epochs
        rest = len(source.y) - VALIDATION
        most = min(self.samples[1], max(self.samples[0], round(rest * 0.6)))
        rate = 1.0
        if rng.random() < self.varied_rates:
            rate = 2.0 ** rng.uniform(-3, 1)
        return Context(
            source=name,
            width=int(rng.choice(widths)),
            samples=round(_between(rng, self.samples[0], most)),
            epochs=int(rng.integers(epochs[0], epochs[1] + 1)),
            price=_between(rng, *self.prices),
            noise=float(rng.choice(self.noises)),
            optimizer="sgd" if rng.random() < 0.5 else "adamw",
            rate=rate,
            key=int(rng.integers(2**31)),
        )


@cache
def _array_of(names: tuple[str, ...]) -> NDArray[np.str_]:
    return np.array(names)


def _between(
    rng: np.random.Generator,
    low: float,
    high: float,
) -> float:
    """Draws log-uniformly."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def task_of(
    context: Context,
    factor: int = 1,
) -> Task:
    """Returns the task of a context, with hosts whose widths are multiplied by ``factor`` from the start."""
    source = load_source(context.source)
    rng = np.random.default_rng([context.key, 1])
    rows = rng.permutation(len(source.y))
    cuts = [
        VALIDATION,
        VALIDATION + context.samples,
        VALIDATION + context.samples + MOST_TEST,
    ]
    validation, train, test = np.split(rows, cuts)[:3]
    x = _normalised(source, train)
    y = source.y.copy()
    noisy = train[rng.random(len(train)) < context.noise]
    y[noisy] = rng.integers(source.classes, size=len(noisy))

    def split(part: Ints) -> Split:
        inputs = torch.from_numpy(x[part]).float()
        if source.images:
            inputs = inputs[:, None]
        return Split(inputs.contiguous(), torch.from_numpy(y[part]))

    return Task(
        name=context.source,
        classes=source.classes,
        build_host=partial(_build, context, factor),
        learning_rate=context.learning_rate,
        optimizer=context.optimizer,
        weight_decay=1e-3 if context.optimizer == "adamw" else 1e-4,
        batch_size=context.batch_size,
        n_envs=1,
        episode_length=context.epochs,
        at_once=True,
        train=split(train),
        validation=split(validation),
        test=split(test),
    )


def _normalised(
    source: Source,
    train: Ints,
) -> Floats:
    """Scales rows by mean and deviation of the training rows: of each column of a table, of all pixels of images."""
    seen = source.x[train]
    axes = None if source.images else 0
    deviation = seen.std(axis=axes)
    scaled = (source.x - seen.mean(axis=axes)) / np.where(deviation > 0, deviation, 1.0)
    return np.asarray(np.clip(scaled, -5, 5))


def _build(
    context: Context,
    factor: int,
) -> CNNHost | GraftedHost:
    source = load_source(context.source)
    width = context.width * factor
    if source.images:
        host = CNNHost(
            1,
            source.classes,
            base=width,
            blocks=2,
            pool_last=False,
        )
        host.use_slots(["r2"])
        return host
    network = nn.Sequential(
        nn.Linear(source.x.shape[1], width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, source.classes),
    )
    return graft(network, {"r2c0": "0 -> 2", "r2c1": "2 -> 4"}, topology="mlp")
