"""`digits_table`: the digits of `digits` as a table of 64 numbers, for hosts of the topology `mlp`."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from esper.data import digits
from esper.data.split import Split
from esper.data.task import Task
from esper.hosts.graft import GraftedHost, graft
from esper.hosts.sizes import HostFamily

NAME = "digits_table"
DESCRIPTION = "the digits of `digits` as a table of 64 numbers (997 / 400 / 400); MLP of 682 parameters"
WIDTH = 8


def of_widths(first: int, second: int) -> GraftedHost:
    """Makes an MLP with two hidden layers, and a slot after each (row 0); those of row 2 have more hidden units."""
    network = nn.Sequential(
        nn.Linear(64, first),
        nn.ReLU(),
        nn.Linear(first, second),
        nn.ReLU(),
        nn.Linear(second, 10),
    )
    sites = {
        "r0c0": "1",
        "r0c1": "3",
        "r2c0": "0 -> 2",
        "r2c1": "2 -> 4",
    }
    host = graft(network, sites, topology="mlp")
    host.use_slots(["r0"])
    return host


def of_width(width: int) -> GraftedHost:
    """Makes an MLP with two hidden layers of the same width."""
    return of_widths(width, width)


build_host = HostFamily(of_width, width=WIDTH)


def load() -> Task:
    """Loads the task, with the splits of `digits`."""
    images = digits.load()

    def rows(split: Split) -> Split:
        return Split(split.x.flatten(1), split.y)

    assert isinstance(images.train, Split)
    return replace(
        images,
        name=NAME,
        description=DESCRIPTION,
        build_host=build_host,
        train=rows(images.train),
        validation=rows(images.validation),
        test=rows(images.test),
        optimizer="adamw",  # compared with SGD for the host alone (benchmarks/results/host_training.md)
        learning_rate=0.03,
        weight_decay=0.01,
    )
