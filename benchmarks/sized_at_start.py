"""Let a Grower choose the size of networks before they are trained, beside those left alone, a sweep, and halving.

    python benchmarks/uci_tables.py FOLDER
    python benchmarks/sized_at_start.py [--seeds 10]

Each network starts too small, about right and too large. None of the data was used to train or tune the advisor. A
sweep trains all widths; its best has the most validation accuracy, as the mean of the other seeds. Halving trains all
widths for 0.3 of the epochs and goes on with the best on validation. The table has test accuracies (pp) as means over
seeds with 95 % intervals; the second one has the bars by the names of starts and by what the sweep found.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import stats
from sized_cases import CASES, rows_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import esper

EPOCHS = 20
HALVED = 6
"""Epochs of the first part of halving."""
BATCH = 32
SAMPLES = 400
HELD = 300
"""Samples of validation, and at most five times as many of test."""
NAMES = ("too small", "about right", "too large")
Job = tuple[str, int, int, bool]


@dataclass(frozen=True)
class Trained:
    validation: tuple[float, ...]
    """After each epoch, %."""
    test: float
    parameters: int
    seconds: float
    """Of processor time."""


class Training:
    """A network of a case, its data in parts that depend on the seed, and its optimizer."""

    def __init__(self, name: str, width: int, seed: int) -> None:
        torch.set_num_threads(1)
        case = CASES[name]
        x, self.y = rows_of(name)
        shuffled = np.random.default_rng([seed, 7]).permutation(len(x))
        order = torch.from_numpy(shuffled)
        fit, self.held, rest = order.split([SAMPLES, HELD, len(x) - SAMPLES - HELD])
        self.rest = rest[: 5 * HELD]
        if x.is_floating_point():
            x = (x - x[fit].mean(dim=0)) / x[fit].std(dim=0).clamp(min=1e-3)
            x = x.clamp(-5, 5)
        self.x = x
        self.classes = int(self.y.max()) + 1
        torch.manual_seed(seed)
        self.model = case.build(x.shape[1], self.classes, width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), case.rate)
        data = TensorDataset(x[fit], self.y[fit])
        self.loader = DataLoader(data, BATCH, shuffle=True, drop_last=True)

    def score(self, rows: Tensor) -> Callable[[nn.Module], Tensor]:
        """Returns a function that scores samples, [n]."""

        @torch.no_grad()
        def right(network: nn.Module) -> Tensor:
            network.eval()
            found = network(self.x[rows]).argmax(-1) == self.y[rows]
            return found.float().reshape(len(rows), -1).mean(dim=1)

        return right

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        logits = self.model(inputs).flatten(0, -2)
        nn.functional.cross_entropy(logits, labels.flatten()).backward()
        self.optimizer.step()

    def epoch(self, grower: esper.Grower | None) -> float:
        """Trains an epoch; returns the score on validation data, %."""
        self.model.train()
        for inputs, labels in self.loader:
            self.step(inputs, labels)
        held = self.score(self.held)
        if grower is not None:
            return 100 * grower.step(held).score
        return 100 * float(held(self.model).mean())

    def run(self, advised: bool) -> Trained:
        began = time.process_time()
        grower = self.grower() if advised else None
        validation = tuple(self.epoch(grower) for _ in range(EPOCHS))
        if grower is not None:
            self.model = grower.finish(merge=True, quiet=True)
        seconds = time.process_time() - began
        test = 100 * float(self.score(self.rest)(self.model).mean())
        return Trained(validation, test, parameters_of(self.model), seconds)

    def grower(self) -> esper.Grower:
        """Returns one that has decided."""
        grower = esper.Grower(
            self.model,
            "auto",
            self.optimizer,
            horizon=EPOCHS,
            example=self.x[:4],
            samples=self.loader,
            classes=self.classes,
            merge=True,
        )
        grower.start(self.score(self.held))
        return grower

    def operations(self, advised: bool) -> float:
        """Returns the operations of a training with its scores; from the second epoch on, they are the same."""
        grower = None
        with FlopCounterMode(display=False) as first:
            if advised:
                grower = self.grower()
            self.epoch(grower)
        with FlopCounterMode(display=False) as second:
            self.epoch(grower)
        return float(first.get_total_flops() + (EPOCHS - 1) * second.get_total_flops())


def parameters_of(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def job(arguments: Job) -> Trained:
    name, width, seed, advised = arguments
    return Training(name, width, seed).run(advised)


def count(arguments: tuple[str, int, bool]) -> float:
    name, width, advised = arguments
    return Training(name, width, 0).operations(advised)


@dataclass
class Row:
    """One start of a case."""

    case: str
    width: int
    start: int
    """Index in ``NAMES``."""
    found: int
    """The same, by the sweep."""
    alone: np.ndarray
    """Test accuracy by seed, as those below."""
    advised: np.ndarray
    same: np.ndarray
    swept: np.ndarray
    halved: np.ndarray
    first: int
    """Parameters."""
    grown: float
    smallest: int
    """Parameters of the narrowest network within 0.5 pp of the best, as means."""
    operations: float
    """In those of a network of the nearest size of the sweep."""
    seconds: float
    halving: float
    """Operations of halving in those of the advised training."""


@dataclass
class Results:
    trained: dict[Job, Trained] = field(default_factory=dict)
    operations: dict[tuple[str, int, bool], float] = field(default_factory=dict)

    def rows(self, name: str, seeds: int) -> list[Row]:
        case = CASES[name]
        alone = [
            [self.trained[name, w, s, False] for s in range(seeds)] for w in case.widths
        ]
        test = np.array([[one.test for one in row] for row in alone])
        last = np.array([[one.validation[-1] for one in row] for row in alone])
        early = np.array([[one.validation[HALVED - 1] for one in row] for row in alone])
        sizes = [row[0].parameters for row in alone]
        means = test.mean(axis=1)
        smallest = int(np.flatnonzero(means >= means.max() - 0.5)[0])
        others = [np.delete(last, s, axis=1).mean(axis=1) for s in range(seeds)]
        swept = np.array(
            [test[of_others.argmax(), s] for s, of_others in enumerate(others)]
        )
        chosen = early.argmax(axis=0)
        halved = test[chosen, np.arange(seeds)]
        costs = np.array([self.operations[name, w, False] for w in case.widths])
        share = HALVED / EPOCHS
        halving = float((share * costs.sum() + (1 - share) * costs[chosen]).mean())
        rows = []
        for start, width in enumerate(case.starts):
            advised = [self.trained[name, width, s, True] for s in range(seeds)]
            near = [
                int(np.abs(np.array(sizes) - one.parameters).argmin())
                for one in advised
            ]
            same = [alone[n][s] for s, n in enumerate(near)]
            times = [
                one.seconds / other.seconds
                for one, other in zip(advised, same, strict=True)
            ]
            at = case.widths.index(width)
            row = Row(
                case=name,
                width=width,
                start=start,
                found=found_by_sweep(width, case.widths[smallest]),
                alone=test[at],
                advised=np.array([one.test for one in advised]),
                same=np.array([one.test for one in same]),
                swept=swept,
                halved=halved,
                first=sizes[at],
                grown=float(np.mean([one.parameters for one in advised])),
                smallest=sizes[smallest],
                operations=self.operations[name, width, True] / costs[near[0]],
                seconds=float(np.median(times)),
                halving=halving / self.operations[name, width, True],
            )
            rows.append(row)
        return rows


def found_by_sweep(width: int, smallest: int) -> int:
    """Returns the index in ``NAMES`` of a width, by the smallest one within 0.5 pp of the best."""
    if width < smallest:
        return 0
    return 1 if width <= 2 * smallest else 2


def bounds(values: np.ndarray) -> tuple[float, float]:
    """Returns the mean of values by seed and half of its 95 % interval."""
    error = stats.sem(values) * stats.t.ppf(0.975, len(values) - 1)
    return float(values.mean()), float(error)


def interval(values: np.ndarray) -> str:
    mean, error = bounds(values)
    return f"{mean:+.1f} ± {error:.1f}"


def write_rows(rows: Sequence[Row]) -> None:
    heads = (
        "network",
        "width at first: accuracy alone",
        "by the sweep",
        "advised minus alone, pp",
        "minus the same size",
        "minus the best of the sweep",
        "minus halving",
        "parameters at first, advised, smallest within 0.5 pp",
        "operations",
        "seconds",
    )
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for row in rows:
        cells = (
            row.case,
            f"{row.width}: {row.alone.mean():.1f} %",
            NAMES[row.found],
            interval(row.advised - row.alone),
            interval(row.advised - row.same),
            interval(row.advised - row.swept),
            interval(row.advised - row.halved),
            f"{row.first:,}, {row.grown:,.0f}, {row.smallest:,}",
            f"{row.operations:.2f}",
            f"{row.seconds:.2f}",
        )
        print(f"| {' | '.join(cells)} |")


def write_bars(rows: Sequence[Row]) -> None:
    """Prints what the bars ask for, with starts as they are called and as the sweep found them."""
    print("\n| | as called | by the sweep |\n|---|---|---|")
    columns = [[row.start for row in rows], [row.found for row in rows]]
    print(
        f"| starts {', '.join(NAMES)} | {' | '.join(counts(kinds) for kinds in columns)} |"
    )
    gains = [bounds(row.advised - row.alone) for row in rows]
    lines: dict[str, list[str]] = {}
    for kinds in columns:
        small = [gain for gain, kind in zip(gains, kinds, strict=True) if kind == 0]
        others = [row for row, kind in zip(rows, kinds, strict=True) if kind]
        above = sum(mean - error > 1 for mean, error in small)
        mean = np.mean([mean for mean, _ in small])
        cell = f"{mean:+.1f} pp; {above} of {len(small)}"
        lines.setdefault("too small: gain, intervals above +1 pp", []).append(cell)
        ratios = [row.grown / row.first for row in others]
        cell = (
            f"{np.mean(ratios):.2f}; {sum(r <= 1.25 for r in ratios)} of {len(ratios)}"
        )
        lines.setdefault("others: times the parameters, at most 1.25", []).append(cell)
        gain = np.mean([(row.advised - row.alone).mean() for row in others])
        lines.setdefault("others: gain", []).append(f"{gain:+.1f} pp")
    for head, cells in lines.items():
        print(f"| {head} | {' | '.join(cells)} |")
    beside = {
        "alone": np.mean([(row.advised - row.alone).mean() for row in rows]),
        "the same size": np.mean([(row.advised - row.same).mean() for row in rows]),
        "the sweep": np.mean([(row.advised - row.swept).mean() for row in rows]),
        "halving": np.mean([(row.advised - row.halved).mean() for row in rows]),
    }
    worse = [
        f"{row.case} {row.width}"
        for row, (m, e) in zip(rows, gains, strict=True)
        if m + e < -0.5
    ]
    within = [row for row in rows if row.grown <= 2 * row.smallest]
    began = [row for row in rows if row.first <= 2 * row.smallest]
    stayed = sum(row.grown <= 2 * row.smallest for row in began)
    half = sum(row.grown < row.smallest / 2 for row in rows)
    print(
        f"\nMinus {', '.join(f'{name}: {mean:+.2f}' for name, mean in beside.items())}"
    )
    print(f"Intervals below -0.5 pp of alone: {', '.join(worse) or 'none'}")
    print(
        f"At most twice the smallest: {len(within)} of {len(rows)}; of those that began so, {stayed} of {len(began)}"
    )
    print(f"Less than half of the smallest: {half}")
    costs = [row.operations for row in rows]
    print(f"Operations: mean {np.mean(costs):.2f}, most {max(costs):.2f}")
    print(f"Seconds: median {np.median([row.seconds for row in rows]):.2f}")
    print(
        f"Halving: {np.median([row.halving for row in rows]):.1f} times the operations, as a median"
    )


def counts(kinds: Sequence[int]) -> str:
    return ", ".join(str(kinds.count(kind)) for kind in range(len(NAMES)))


def jobs_of(cases: Sequence[str], seeds: int) -> list[Job]:
    jobs = []
    for seed in range(seeds):
        for name in cases:
            if seed < CASES[name].seeds:
                jobs += [(name, width, seed, False) for width in CASES[name].widths]
                jobs += [(name, width, seed, True) for width in CASES[name].starts]
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10, help="at most")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    args = parser.parse_args()
    results = Results()
    jobs = jobs_of(args.cases, args.seeds)
    counted = [job[:2] + job[3:] for job in jobs if job[2] == 0]
    with ProcessPoolExecutor(2) as pool:
        trained = pool.map(job, jobs)
        results.operations.update(zip(counted, pool.map(count, counted), strict=True))
        results.trained.update(zip(jobs, trained, strict=True))
    rows = []
    for name in args.cases:
        rows += results.rows(name, min(args.seeds, CASES[name].seeds))
    write_rows(rows)
    write_bars(rows)


if __name__ == "__main__":
    main()
