"""A search for how a task's host alone is trained best in the epochs that its episodes have.

    python benchmarks/search_training.py digits --seed 20000

It goes from setting to setting: optimizer and learning rate together, then weight decay, label smoothing, warm-up, and
the learning rate once more. A value is kept if it raises the mean validation accuracy; all candidates train hosts with
the same initial weights and batches. The best few train more hosts, since a rate at the edge of what is stable ruins
only one in many. The best of these and the task's defaults then train further hosts, whose accuracies on test images
are compared in pairs. Prints Markdown.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import numpy as np

from esper.compare.statistics import Floats, compare_pairs
from esper.config import TrainingConfig
from esper.data.task import resolve
from esper.env.make import EnvMaker
from esper.env.no_growth import no_growth_loop
from esper.training.execution.tiers import make_executor
from esper.training.host_trainer import HostTrainer, make_trainings

Settings = dict[str, Any]
"""Fields of the config's section ``task``."""

FIELDS = (
    "optimizer",
    "learning_rate",
    "weight_decay",
    "label_smoothing",
    "warmup_epochs",
)
RATES = {
    "sgd": (0.02, 0.05, 0.1, 0.2, 0.4, 0.8),
    "adamw": (0.001, 0.003, 0.01, 0.03, 0.1),
}
DECAYS = {"sgd": (0.0, 5e-4, 2e-3), "adamw": (0.0, 0.01, 0.1, 0.3)}
SMOOTHINGS = (0.0, 0.1, 0.2)
WARM_UPS = (0.0, 0.1, 0.3)
"""Fractions of the episode over which the rate rises; the last is that of a one-cycle schedule."""
NEARBY = (0.5, 0.7, 1.4, 2.0)
"""Factors of the best rate that are tried in the end."""


STEPS = 5


def candidates(step: int, best: Settings, epochs: int) -> list[Settings]:
    """Returns the candidates of a step of the search, which starts from the best settings so far."""
    if step == 0:
        found = []
        for name, rates in RATES.items():
            own = {"optimizer": name, "weight_decay": DECAYS[name][1]}
            found += [{**best, **own, "learning_rate": rate} for rate in rates]
        return found
    warm_ups = [round(part * epochs, 1) for part in WARM_UPS]
    rates_nearby = [round(best["learning_rate"] * factor, 6) for factor in NEARBY]
    field, values = (
        ("weight_decay", DECAYS[best["optimizer"]]),
        ("label_smoothing", SMOOTHINGS),
        ("warmup_epochs", warm_ups),
        ("learning_rate", rates_nearby),
    )[step - 1]
    return [{**best, field: value} for value in values]


def train(
    maker: EnvMaker, settings: Settings, hosts: int, seed: int
) -> tuple[Floats, Floats, Floats]:
    """Trains hosts alone; returns their validation accuracy, its loss, and their test accuracy (pp), each [hosts]."""
    assert maker.task is not None
    config = resolve(maker.config.with_values(task=settings), maker.task)
    training = make_trainings([maker.task] * hosts, [config] * hosts, range(hosts))
    with make_executor(config.run, maker.task.device) as executor:
        trainer = HostTrainer(maker.task, training, executor)
        try:
            loop, alone = no_growth_loop(trainer)
            *_, state = loop.without_growth(seed)
            return (
                state.committed.copy(),
                state.committed_loss.copy(),
                np.array(alone.test_accuracy(state)),
            )
        finally:
            trainer.close()


def shown(settings: Settings) -> str:
    return " | ".join(f"{settings[name]}" for name in FIELDS)


HEAD = "| optimizer | rate | weight decay | label smoothing | warm-up epochs | validation % | ± | lowest | loss |"


def row(maker: EnvMaker, settings: Settings, hosts: int, seed: int) -> float:
    """Prints the row of one candidate; returns the mean validation accuracy of its hosts."""
    accuracy, loss, _ = train(maker, settings, hosts, seed)
    error = accuracy.std(ddof=1) / np.sqrt(hosts)
    measured = f"{accuracy.mean():.2f} | {error:.2f} | {accuracy.min():.2f} | {loss.mean():.3f}"
    print(f"| {shown(settings)} | {measured} |", flush=True)
    return float(accuracy.mean())


def search(maker: EnvMaker, start: Settings, arguments: argparse.Namespace) -> Settings:
    """Prints a table of all candidates, and one of the finalists on more hosts; returns the best of these."""
    print(f"{HEAD}\n{'|---' * 9}|")
    best, found = start, list[tuple[float, int, Settings]]()
    for number in range(arguments.steps):
        for settings in candidates(number, best, maker.config.env.episode_length or 0):
            if all(settings != tried for _, _, tried in found):
                found.append(
                    (
                        row(maker, settings, arguments.hosts, arguments.seed),
                        -len(found),
                        settings,
                    )
                )
        best = max(found)[2]
    leaders = sorted(found, reverse=True)
    others = (entry for entry in leaders if entry[2]["optimizer"] != best["optimizer"])
    finalists = [*leaders[: arguments.finalists], *itertools.islice(others, 1)]
    print(
        f"\nThe best of these, and the best of the other optimizer, on other hosts:\n\n{HEAD}\n{'|---' * 9}|"
    )
    hosts, seed = arguments.final_hosts, arguments.seed + 1
    final = []
    for _, order, settings in finalists:
        final.append((row(maker, settings, hosts, seed), order, settings))
    return max(final)[2]


def compare(
    maker: EnvMaker, best: Settings, default: Settings, hosts: int, seed: int
) -> None:
    """Prints the paired difference between hosts trained by two settings, on test images."""
    *_, tuned = train(maker, best, hosts, seed)
    *_, usual = train(maker, default, hosts, seed)
    pair = compare_pairs(tuned, usual)
    low, high = pair.interval
    print(
        f"\nTest accuracy of {hosts} further hosts, trained by {shown(best)} and by {shown(default)}, in pairs:"
    )
    print(
        f"{pair.mean_a:.2f} and {pair.mean_b:.2f} %, difference {pair.difference:+.2f} pp [{low:.2f}, {high:.2f}]."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task")
    parser.add_argument(
        "--seed",
        type=int,
        default=20_000,
        help="run seed of the hosts that are searched on",
    )
    parser.add_argument(
        "--hosts", type=int, default=4, help="hosts for every candidate"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        choices=range(1, STEPS + 1),
        help="1: optimizer and rate only",
    )
    parser.add_argument("--finalists", type=int, default=3)
    parser.add_argument(
        "--final-hosts", type=int, default=16, help="hosts for every finalist"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a setting of the hosts that are compared with, instead of the task's default",
    )
    arguments = parser.parse_args()

    maker = EnvMaker.of(TrainingConfig.parse({"task": {"name": arguments.task}}))
    default = {name: getattr(maker.config.task, name) for name in FIELDS}
    epochs = maker.config.env.episode_length or 0
    for entry in arguments.set:
        name, value = entry.split("=", 1)
        default[name] = type(default[name])(value)
    start = {**default, "label_smoothing": 0.1, "warmup_epochs": round(0.1 * epochs, 1)}
    best = search(maker, start, arguments)
    compare(maker, best, default, arguments.final_hosts, arguments.seed + 2)


if __name__ == "__main__":
    main()
