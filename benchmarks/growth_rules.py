"""When should a host grow? At once, by a schedule, at a plateau, or where need is large, on 12 contexts of `digits`.

    python -m benchmarks.growth_rules --pairs 20

Hosts of four widths train on three amounts of data; what they grow is merged. `at once` doubles all layers before
epochs 0 and 1, `in steps` before epochs 2 and 4 of 30. Rules plant what they choose, within the same budget of
parameters. Since they end in different sizes, a score takes a price off test accuracy for each doubling of the
parameters. Prints accuracies and doublings of each context, and scores over all contexts with their intervals, as
Markdown.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.need import few
from esper.compare.arms import read_arms
from esper.compare.comparison_run import ComparisonRun
from esper.compare.statistics import compare_pairs
from esper.data.task import Task
from esper.data.tasks import load_task
from esper.hosts.cnn import CNNHost

SEED = 74_000
BASES = (2, 3, 5, 7)
"""Channels of the first of two blocks; the second has twice as many."""
SAMPLES = (100, 300, 997)
PRICES = (0.5, 1.0, 2.0)
"""Gain that a doubling of the parameters must bring, pp."""
ARMS = {
    "at once": "schedule:AT_ONCE",
    "in steps": "schedule:SCHEDULE",
    "plateau": "plateau",
    "need": "need",
    "heuristic": "heuristic",
    "none": "none",
}
EPOCHS = {"AT_ONCE": (0, 1), "SCHEDULE": (2, 4)}
"""Epochs before which all layers are doubled."""
Floats = NDArray[np.float64]


def context(base: int, samples: int) -> Task:
    """Returns `digits` with a host of that width, and as many training samples."""
    task = load_task("digits")
    if samples < task.samples:
        task = few(task, samples)
    host = partial(CNNHost, 1, 10, base=base, blocks=2, pool_last=False, rows=2)
    return replace(task, build_host=host)


def schedule_of(epochs: tuple[int, ...]) -> str:
    """Returns a schedule that doubles both layers before each of ``epochs``."""
    entries = [
        f'[[action]]\nepoch = {epoch}\nop = "GERMINATE"\nslot = "{slot}"\nblueprint = "widen_whole"\n'
        for epoch in epochs
        for slot in ("r2c0", "r2c1")
    ]
    return "\n".join(entries)


def play(task: Task, pairs: int) -> dict[str, tuple[Floats, Floats]]:
    """Returns test accuracies, pp, and doublings of the parameters of each arm, [pairs]."""
    base: dict[str, Any] = {
        "task": {"name": task.name},
        "run": {"seed": SEED},
        "env": {
            "baseline_episodes": 1,
            "n_envs": min(pairs, 10),
            "slots": ["r2"],
            "at_once": True,
            "merge": True,
            "edits_per_epoch": 8,
            "need_every": 1,
            "parameter_budget": 16.0,
        },
    }
    with TemporaryDirectory() as folder:
        texts = []
        for arm, controller in ARMS.items():
            for name, epochs in EPOCHS.items():
                file = Path(folder) / f"{name.lower()}.toml"
                file.write_text(schedule_of(epochs))
                controller = controller.replace(name, str(file))
            texts.append(f"{arm}:controller={controller}")
        read = read_arms(texts, base)
        run = ComparisonRun(
            read, pairs, f"{folder}/out", reference=read[0].name, task=task
        )
        hosts = run.run().hosts
    found = {}
    for arm, results in hosts.items():
        accuracy = np.array([host.accuracy for host in results])
        ratios = [host.parameters / host.host_parameters for host in results]
        found[arm] = accuracy, np.log2(ratios)
    return found


def main() -> None:
    """Compare the rules on all contexts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument(
        "--samples",
        type=int,
        action="append",
        choices=SAMPLES,
        help="only with these amounts of data",
    )
    options = parser.parse_args()
    print(
        f"Test accuracy, and doublings of the parameters; {options.pairs} hosts each.\n"
    )
    print(f"| first block, samples | {' | '.join(ARMS)} |")
    print(f"|---|{'---|' * len(ARMS)}", flush=True)
    results: dict[str, list[tuple[Floats, Floats]]] = {arm: [] for arm in ARMS}
    for samples in options.samples or SAMPLES:
        for base in BASES:
            found = play(context(base, samples), options.pairs)
            cells = []
            for arm in ARMS:
                accuracy, doublings = found[arm]
                results[arm].append(found[arm])
                cells.append(f"{accuracy.mean():.2f}, {doublings.mean():.1f}")
            print(f"| {base}, {samples} | {' | '.join(cells)} |", flush=True)
    print("\n| arm | doublings |", end="")
    print("".join(f" score at {price:g} | `at once` minus it |" for price in PRICES))
    print(f"|---|---|{'---|---|' * len(PRICES)}")
    every: dict[str, tuple[Floats, Floats]] = {}
    for arm, of_contexts in results.items():
        accuracies, doubled = zip(*of_contexts, strict=True)
        every[arm] = np.concatenate(accuracies), np.concatenate(doubled)
    for arm, (accuracy, doublings) in every.items():
        cells = [arm, f"{doublings.mean():.2f}"]
        for price in PRICES:
            score = accuracy - price * doublings
            first = every["at once"][0] - price * every["at once"][1]
            pair = compare_pairs(first, score)
            cells.append(f"{score.mean():.2f}")
            interval = f"[{pair.interval.low:+.2f}, {pair.interval.high:+.2f}]"
            cells.append(
                "" if arm == "at once" else f"{pair.difference:+.2f} {interval}"
            )
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
