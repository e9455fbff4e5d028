"""The cost of an epoch of a host whose kept seeds are a part of its layers, beside an ordinary network of its size.

    python benchmarks/grown_epoch.py

Each host grows by its task's own blueprints, all merged. The ordinary network is the task's host in the width that is
nearest in parameters (``esper.hosts.sizes``), as ``bigger`` of a comparison. Both train in turns, one thread, eager and
native; prints the medians of the seconds of an epoch and of their ratios, with the range from the 10th to the 90th
percentile, as Markdown.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
import torch

from esper.config import TrainingConfig
from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import STYLES
from esper.core.site import Role
from esper.data.task import Task, resolve
from esper.data.tasks import load_task
from esper.hosts.sizes import nearest_in_size
from esper.training.host_trainer import make_trainings
from esper.training.host_training import HostTraining
from esper.training.merging import merge_fossils
from esper.training.native import NativePasses
from esper.training.step import train_epoch


@dataclass(frozen=True)
class Case:
    """A task, and the seeds that its host keeps, one after the other."""

    task: str
    seeds: tuple[tuple[str, str], ...]


WHOLE = "widen_whole"
CASES = (
    Case("digits", (("r2c0", WHOLE), ("r2c1", WHOLE))),
    Case("digits", (("r2c0", WHOLE), ("r2c1", WHOLE)) * 2),
    Case("digits", (("r2c0", WHOLE), ("r2c1", WHOLE)) * 3),
    Case("digits_table", (("r2c0", WHOLE), ("r2c1", WHOLE)) * 2),
    Case("chars", (("r1c0", WHOLE), ("r2c0", WHOLE), ("r0c0", "repeat"))),
)


def training_of(task: Task, native: bool) -> HostTraining:
    """Makes a host in training with all possible slots."""
    config = resolve(
        TrainingConfig.parse({"env": {"slots": ["all"], "at_once": True}}), task
    )
    (training,) = make_trainings([task], [config], [0])
    if native:
        training.native = NativePasses(training)
    training.reset(0, 0)
    return training


def grow(training: HostTraining, case: Case) -> None:
    """Plants and merges the seeds of a case."""
    for slot, name in case.seeds:
        site = training.site_by_name[slot]
        recipe = BLUEPRINTS.at(training.host.topology, site.place, name)
        training.plant(site, recipe, STYLES["LINEAR_ADD"])
        training.assign(site, Role.FOSSIL, 1.0, 1.0, learning=True)
        reasons = merge_fossils(training, [slot])
        assert not reasons, reasons


def seconds(training: HostTraining) -> float:
    """Returns the time of an epoch."""
    start = perf_counter()
    train_epoch(training)
    return perf_counter() - start


def spread(values: list[float], digits: int) -> str:
    """Returns the median with the range from the 10th to the 90th percentile."""
    low, middle, high = np.percentile(values, (10, 50, 90))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def row(case: Case, native: bool, budget: float) -> str:
    """Measures a case for about ``budget`` seconds; returns its row."""
    task = load_task(case.task)
    grown = training_of(task, native)
    grow(grown, case)
    size = grown.host.parameter_count
    family = nearest_in_size(task.build_host, size, task.sample)
    ordinary = training_of(replace(task, build_host=family), native)
    for training in (grown, ordinary):
        seconds(training)
    times: list[tuple[float, float]] = []
    end = perf_counter() + budget
    while perf_counter() < end or len(times) < 5:
        pair = (seconds(grown), seconds(ordinary))
        times.append(pair)
    if native:
        for training in (grown, ordinary):
            assert training.native is not None
            assert not training.native.reasons, training.native.reasons
    cells = [
        f"`{case.task}`, {len(case.seeds)} seeds",
        "native" if native else "eager",
        f"{size:,}",
        f"{ordinary.host.parameter_count:,}",
        spread([1000 * mine for mine, _ in times], 1),
        spread([1000 * other for _, other in times], 1),
        spread([mine / other for mine, other in times], 2),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=12.0, help="time of each row (default: 12)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| host | steps | parameters | of the ordinary one | ms an epoch | of the ordinary one | ratio |"
    )
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        for native in (False, True):
            print(row(case, native, arguments.seconds), flush=True)


if __name__ == "__main__":
    main()
