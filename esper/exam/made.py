"""Made data: tables and small images drawn from wide laws, so that a policy can learn from data of nobody."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from esper.core.arrays import Floats, Ints

ROWS = 1_600
"""Samples of a made data set."""
SIDE = 8
"""Height and width of made images."""
CLASSES = (2, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 26)


def made_table(seed: int) -> tuple[Floats, Ints]:
    """Draws a table, float64 [N, D], with its classes, int64 [N].

    Some columns inform about the class by one of three laws; the others are noise. Half of the tables are mixed by a
    random matrix, and a third have columns with long or short tails.
    """
    rng = np.random.default_rng([seed, 1])
    columns = round(np.exp(rng.uniform(np.log(4), np.log(120))))
    informative = int(np.clip(np.ceil(columns * rng.uniform(0.15, 1)), 3, columns))
    law = LAWS[rng.integers(len(LAWS))]
    x, y = law(rng, informative, int(rng.choice(CLASSES)))
    noise = rng.normal(size=(ROWS, columns - informative))
    x = np.concatenate(
        [x, noise],
        axis=1,
    )
    if rng.random() < 0.5:
        x = x @ rng.normal(size=(columns, columns)) / np.sqrt(columns)
    if rng.random() < 0.3:
        x = np.sign(x) * np.abs(x) ** rng.uniform(0.5, 2)
    return x, y


def _clusters(
    rng: np.random.Generator,
    columns: int,
    classes: int,
) -> tuple[Floats, Ints]:
    """Each class is a mixture of up to four normal clusters of one shape."""
    each = int(rng.integers(1, 5))
    centres = rng.normal(size=(classes * each, columns)) * rng.uniform(0.5, 2.2)
    cluster = rng.integers(
        classes * each,
        size=ROWS,
    )
    shape = rng.normal(size=(columns, columns)) / np.sqrt(columns) * rng.uniform(0.5, 1.5)
    x = centres[cluster] + rng.normal(size=(ROWS, columns)) @ shape
    return x, cluster % classes


def _teacher(
    rng: np.random.Generator,
    columns: int,
    classes: int,
) -> tuple[Floats, Ints]:
    """The class is the largest output of a random network with one hidden layer."""
    hidden = round(np.exp(rng.uniform(np.log(2), np.log(64))))
    x = rng.normal(size=(ROWS, columns))
    z = x @ rng.normal(size=(columns, hidden)) * rng.uniform(0.5, 2) / np.sqrt(columns)
    bias = rng.normal(size=hidden)
    activations = np.tanh(2 * z + bias) if rng.random() < 0.5 else np.maximum(z + 0.3 * bias, 0)
    outputs = activations @ rng.normal(size=(hidden, classes))
    outputs = (outputs - outputs.mean(axis=0)) / (outputs.std(axis=0) + 1e-6)
    return x, outputs.argmax(axis=1)


def _tree(
    rng: np.random.Generator,
    columns: int,
    classes: int,
) -> tuple[Floats, Ints]:
    """The class is that of the leaf of a random tree of two to six levels, each of which compares one column."""
    depth = int(rng.integers(2, 7))
    x = rng.normal(size=(ROWS, columns))
    leaf = np.zeros(
        ROWS,
        dtype=np.int64,
    )
    for _ in range(depth):
        right = x[:, rng.integers(columns)] > 0.3 * rng.normal()
        leaf = 2 * leaf + right
    return x, rng.integers(classes, size=2**depth)[leaf]


LAWS: tuple[Callable[[np.random.Generator, int, int], tuple[Floats, Ints]], ...] = (_clusters, _teacher, _tree)


def made_images(seed: int) -> tuple[Floats, Ints]:
    """Draws grey images, float64 [N, 8, 8], with their classes, int64 [N], by one of three laws, in noise."""
    rng = np.random.default_rng([seed, 2])
    law = IMAGE_LAWS[rng.integers(len(IMAGE_LAWS))]
    x, y = law(rng)
    x = (x - x.mean()) / (x.std() + 1e-6)
    return x + rng.normal(size=x.shape) * rng.uniform(0, 1.2), y


def _strokes(rng: np.random.Generator) -> tuple[Floats, Ints]:
    """Each class is a smooth random pattern, moved by up to a pixel and stretched in contrast."""
    classes = int(rng.choice([3, 5, 8, 10, 16]))
    each = int(rng.integers(1, 4))
    patterns = _smooth(rng.normal(size=(classes * each, SIDE, SIDE)))
    pattern = rng.integers(
        classes * each,
        size=ROWS,
    )
    x = patterns[pattern] * rng.uniform(0.5, 1.5, size=(ROWS, 1, 1))
    moves = rng.integers(-1, 2, size=(ROWS, 2))
    for n, (down, right) in enumerate(moves.tolist()):
        x[n] = np.roll(x[n], (down, right), axis=(0, 1))
    return x, pattern % classes


def _gratings(rng: np.random.Generator) -> tuple[Floats, Ints]:
    """The class is the direction of a wave of any phase."""
    classes = int(rng.integers(3, 11))
    y = rng.integers(
        classes,
        size=ROWS,
    )
    angle = y * np.pi / classes + rng.normal(size=ROWS) * 0.05
    phase = rng.uniform(
        0,
        2 * np.pi,
        size=ROWS,
    )
    pace = rng.uniform(
        2.5,
        6.5,
        size=ROWS,
    )
    across, down = np.meshgrid(np.linspace(-1, 1, SIDE), np.linspace(-1, 1, SIDE))
    along = np.multiply.outer(np.cos(angle), across) + np.multiply.outer(np.sin(angle), down)
    return np.sin(pace[:, None, None] * along + phase[:, None, None]), y


def _dots(rng: np.random.Generator) -> tuple[Floats, Ints]:
    """The class is the number of bright dots."""
    classes = int(rng.integers(3, 8))
    y = rng.integers(
        classes,
        size=ROWS,
    )
    order = rng.random((ROWS, SIDE * SIDE)).argsort(axis=1)
    bright = order < 1 + y[:, None]
    return bright.reshape(ROWS, SIDE, SIDE).astype(np.float64), y


IMAGE_LAWS: tuple[Callable[[np.random.Generator], tuple[Floats, Ints]], ...] = (_strokes, _gratings, _dots)


def _smooth(x: Floats) -> Floats:
    """Averages each pixel with its neighbours above, below, left and right."""
    return (x + sum(np.roll(x, by, axis) for by in (-1, 1) for axis in (1, 2))) / 2
