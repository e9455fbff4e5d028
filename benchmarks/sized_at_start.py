"""Let a Grower choose the size of networks before they are trained, beside those left alone and a sweep of widths.

    python benchmarks/uci_tables.py FOLDER
    python benchmarks/sized_at_start.py [--seeds 10]

Each network starts too small, about right and too large. None of the data was used to train or tune the advisor. A
sweep trains all widths; its best has the most validation accuracy, as the mean of the other seeds. The table has test
accuracies (pp) as means over seeds with 95 % intervals.
"""

from __future__ import annotations

import argparse
import io
import time
import tokenize
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.exam.sources import load_source

EPOCHS = 20
BATCH = 32
SAMPLES = 400
HELD = 300
"""Samples of validation, and at most five times as many of test."""
RATE = 0.01
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def mlp(inputs: int, classes: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, classes),
    )


def deep_mlp(inputs: int, classes: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 2 * width),
        nn.Tanh(),
        nn.Linear(2 * width, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, classes),
    )


def cnn(inputs: int, classes: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 14, 14)),
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, classes),
    )


def signal_cnn(inputs: int, classes: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, inputs)),
        nn.Conv1d(1, width, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(width, 2 * width, 5, padding=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
        nn.Linear(8 * width, classes),
    )


def table(name: str) -> tuple[np.ndarray, np.ndarray]:
    source = load_source(name)
    return source.x, source.y


def fashion() -> tuple[np.ndarray, np.ndarray]:
    """Fashion-MNIST at 14 × 14 pixels."""
    from esper.data.tasks import load_task

    split = load_task("fashion_mnist").train
    images = split.inputs(0, 6_000).double().numpy()[:, 0]
    small = images.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4))
    return small.reshape(len(small), -1), split.y[:6_000].numpy()


def signals() -> tuple[np.ndarray, np.ndarray]:
    """MNIST-1D: sequences of 40 numbers of ten kinds."""
    from mnist1d.data import get_dataset_args, make_dataset

    made = make_dataset(get_dataset_args())
    x = np.concatenate([made["x"], made["x_test"]])
    y = np.concatenate([made["y"], made["y_test"]])
    return x, y


def texts() -> tuple[np.ndarray, np.ndarray]:
    """Comments and strings of ten modules of the standard library: pieces of 300 characters, as counts of 128 kinds of
    pairs of characters; the class is the module."""
    folder = Path(tokenize.__file__).parent
    names = (
        "argparse inspect tarfile typing subprocess pickle ast doctest optparse zipfile"
    )
    rows, labels = [], []
    for label, name in enumerate(names.split()):
        source = (folder / f"{name}.py").read_text(encoding="utf-8")
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        kinds = (tokenize.COMMENT, tokenize.STRING)
        text = " ".join(token.string for token in tokens if token.type in kinds)
        for start in range(0, len(text) - 300, 150):
            piece = text[start : start + 300].encode()
            pairs = [(31 * a + b) % 128 for a, b in pairwise(piece)]
            rows.append(np.bincount(pairs, minlength=128))
            labels.append(label)
    return np.sqrt(np.array(rows)), np.array(labels)


@dataclass(frozen=True)
class Case:
    name: str
    load: Callable[[], tuple[np.ndarray, np.ndarray]]
    build: Callable[[int, int, int], nn.Module]
    starts: tuple[int, int, int]
    """Widths that are too small, about right and too large."""


TABLES = ("spam", "vowel", "dna")
CASES = {
    **{
        name: Case(name, lambda name=name: table(name), mlp, (2, 16, 128))
        for name in TABLES
    },
    "shuttle, deep": Case(
        "shuttle, deep", lambda: table("shuttle"), deep_mlp, (2, 16, 64)
    ),
    "fashion": Case("fashion", fashion, cnn, (1, 8, 32)),
    "fashion, flat": Case("fashion, flat", fashion, mlp, (2, 16, 128)),
    "signals": Case("signals", signals, signal_cnn, (1, 8, 32)),
    "texts": Case("texts", texts, mlp, (2, 16, 128)),
}


@cache
def rows_of(name: str) -> tuple[Tensor, Tensor]:
    x, y = CASES[name].load()
    return torch.from_numpy(np.asarray(x)).float(), torch.from_numpy(
        np.asarray(y)
    ).long()


@dataclass(frozen=True)
class Trained:
    validation: float
    test: float
    parameters: int
    seconds: float


def train(name: str, width: int, seed: int, advised: bool) -> Trained:
    torch.set_num_threads(1)
    case = CASES[name]
    x, y = rows_of(name)
    order = torch.from_numpy(np.random.default_rng([seed, 7]).permutation(len(y)))
    fit, held, rest = order.split([SAMPLES, HELD, len(y) - SAMPLES - HELD])
    rest = rest[: 5 * HELD]
    x = (x - x[fit].mean(dim=0)) / x[fit].std(dim=0).clamp(min=1e-3)
    x = x.clamp(-5, 5)
    classes = int(y.max()) + 1
    torch.manual_seed(seed)
    model = case.build(x.shape[1], classes, width)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    loader = DataLoader(
        TensorDataset(x[fit], y[fit]), BATCH, shuffle=True, drop_last=True
    )

    def right(rows: Tensor) -> Callable[[nn.Module], Tensor]:
        def score(network: nn.Module) -> Tensor:
            network.eval()
            return (network(x[rows]).argmax(1) == y[rows]).float()

        return score

    grower = None
    began = time.perf_counter()
    if advised:
        grower = esper.Grower(
            model,
            "auto",
            optimizer,
            horizon=EPOCHS,
            example=x[:4],
            samples=loader,
            classes=classes,
            merge=True,
        )
        grower.start(right(held))
    for _ in range(EPOCHS):
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        if grower is not None:
            grower.step(right(held))
    if grower is not None:
        model = grower.finish(merge=True, quiet=True)
    seconds = time.perf_counter() - began
    with torch.no_grad():
        scores = [100 * float(right(part)(model).mean()) for part in (held, rest)]
    count = sum(p.numel() for p in model.parameters())
    return Trained(*scores, count, seconds)


def job(arguments: tuple[str, int, int, bool]) -> Trained:
    return train(*arguments)


def interval(values: np.ndarray) -> str:
    error = stats.sem(values) * stats.t.ppf(0.975, len(values) - 1)
    return f"{values.mean():+.2f} ± {error:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    args = parser.parse_args()
    jobs = []
    for name in args.cases:
        for seed in range(args.seeds):
            jobs += [(name, width, seed, False) for width in WIDTHS]
            jobs += [(name, width, seed, True) for width in CASES[name].starts]
    with ProcessPoolExecutor(2) as pool:
        results = dict(zip(jobs, pool.map(job, jobs, chunksize=4), strict=True))
    heads = (
        "network",
        "width at first, accuracy alone",
        "advised minus alone, pp",
        "minus the same size from the start",
        "minus the best of the sweep",
        "parameters at first, advised, smallest within 0.5 pp of the best",
        "seconds beside the same size from the start",
    )
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name in args.cases:
        seeds = range(args.seeds)
        held = np.array(
            [[results[name, w, s, False].validation for s in seeds] for w in WIDTHS]
        )
        test = np.array(
            [[results[name, w, s, False].test for s in seeds] for w in WIDTHS]
        )
        sizes = [results[name, w, 0, False].parameters for w in WIDTHS]
        best = [int(np.delete(held, s, axis=1).mean(axis=1).argmax()) for s in seeds]
        swept = np.array([test[best[s], s] for s in seeds])
        means = test.mean(axis=1)
        smallest = next(n for n in range(len(WIDTHS)) if means[n] >= means.max() - 0.5)
        for width in CASES[name].starts:
            advised = [results[name, width, s, True] for s in seeds]
            alone = [results[name, width, s, False] for s in seeds]
            same = [
                same_size(results, name, one.parameters, s)
                for s, one in enumerate(advised)
            ]
            tests = np.array([one.test for one in advised])
            first = np.array([one.test for one in alone])
            grown = np.mean([one.parameters for one in advised])
            times = [
                one.seconds / other.seconds
                for one, other in zip(advised, same, strict=True)
            ]
            cells = (
                name,
                f"{width}: {first.mean():.1f} %",
                interval(tests - first),
                interval(tests - [one.test for one in same]),
                interval(tests - swept),
                f"{alone[0].parameters:,}, {grown:,.0f}, {sizes[smallest]:,}",
                f"{np.median(times):.2f}",
            )
            print(f"| {' | '.join(cells)} |", flush=True)


def same_size(
    results: dict[tuple[str, int, int, bool], Trained],
    name: str,
    parameters: int,
    seed: int,
) -> Trained:
    """Returns the network alone whose size is nearest, of the sweep."""
    alone = [results[name, width, seed, False] for width in WIDTHS]
    return min(alone, key=lambda one: abs(one.parameters - parameters))


if __name__ == "__main__":
    main()
