"""Compute of growing by purpose, and epochs in which seeds come: figures of results/equal_price.md.

    python benchmarks/compute_split.py digits digits_table mnist5k

Plays hosts with a controller and splits the floating-point operations of their episodes: training and validating the
host alone, incubation (what an epoch with incubating seeds costs more than without them), training with seeds that are
on, and validating in more configurations than one. Prints means over hosts, in per cent of the whole, and the mean
epochs from which the first, second, ... seed is incubated, and is on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from esper.compare.compute import (
    FROZEN,
    INCUBATING,
    LEARNING,
    ComputeMeter,
    EpochKind,
    episodes,
)
from esper.compare.runner import GrowingRunner
from esper.config import TrainingConfig
from esper.env.make import EnvMaker

PARTS = (
    "host, training",
    "host, validation",
    "incubation",
    "seeds on, training",
    "more configurations, validation",
)


def without_incubating(kind: EpochKind) -> EpochKind:
    """Returns the epoch as it would be if its incubating seeds were not there, with one configuration."""
    others = tuple(
        None if each is None or each.role == INCUBATING else each
        for each in kind.occupants
    )
    return EpochKind(others, ((0.0,) * len(others),))


def parts(meter: ComputeMeter, episode: Sequence[EpochKind]) -> NDArray[np.float64]:
    """Returns the operations of an episode by ``PARTS``."""
    untrained, *epochs = episode
    train, validate = meter.of_epoch(EpochKind.alone(len(untrained.occupants)))
    found = np.array([len(epochs) * train, len(episode) * validate, 0.0, 0.0, 0.0])
    for kind in epochs:
        trained, validated = meter.of_epoch(kind)
        bare, _ = meter.of_epoch(without_incubating(kind))
        found[2:] += trained - bare, bare - train, validated - validate
    return found


def first(episode: Sequence[EpochKind], roles: Sequence[str]) -> list[int]:
    """Returns the first epoch in which each slot that is ever used has a seed of one of ``roles``, in order."""
    columns = zip(*(kind.occupants for kind in episode), strict=True)
    found = [
        [epoch for epoch, each in enumerate(column) if each and each.role in roles]
        for column in columns
    ]
    return sorted(epochs[0] for epochs in found if epochs)


def split(name: str, controller: str, hosts: int, seed: int) -> None:
    """Prints the rows of one task."""
    maker = EnvMaker.of(
        TrainingConfig.parse({"task": {"name": name}, "run": {"seed": seed}})
    )
    with closing(GrowingRunner(maker, controller, hosts, seed, {})) as runner:
        runner.prepare()
        runner.play(1)
        played = runner.env.backend.map_hosts(episodes)
        assert runner.meter is not None
        spent = np.mean([parts(runner.meter, episode) for episode in played], axis=0)
    shares = " | ".join(f"{share:.0f}" for share in 100 * spent / spent.sum())
    planted, on = (
        ", ".join(
            f"{np.mean(epochs):.0f}"
            for epochs in zip(
                *(first(episode, roles) for episode in played), strict=True
            )
        )
        for roles in ((INCUBATING,), (LEARNING, FROZEN))
    )
    print(f"| `{name}` | {spent.sum() / 1e9:.3g} | {shares} | {planted} | {on} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="+", metavar="TASK")
    parser.add_argument(
        "--controller", default="schedule", help="as of esper run  [default: schedule]"
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=300)
    arguments = parser.parse_args()
    print(
        "| task | GFLOP | "
        + " | ".join(f"{part}, %" for part in PARTS)
        + " | incubated from epoch | on from epoch |"
    )
    print("|---" * (len(PARTS) + 4) + "|")
    for task in arguments.tasks:
        split(task, arguments.controller, arguments.hosts, arguments.seed)
