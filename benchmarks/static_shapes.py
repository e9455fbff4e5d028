"""Accuracy of static hosts of different shapes on `digits` or `digits_table`: what parameters are best spent on.

    python benchmarks/static_shapes.py digits
    python benchmarks/static_shapes.py digits_table

All train as hosts left alone do, on the same batches. Widths are the channels of two blocks, or the features of two
layers. A `deeper` host has further layers behind a block, as a seed in a slot adds them. A `branch` reads what its
block reads, or the network's inputs, and adds to what the block returns. A host that is `wider for the head` has a
convolution whose channels stand beside those that the head reads. Prints Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from search_training import train
from torch import Tensor, cat, nn

import esper
from esper.config import TrainingConfig
from esper.data import digits
from esper.env.make import EnvMaker
from esper.hosts.host import Host


def convolution(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class WithInput(nn.Module):
    """Adds the channels that ``module`` makes to those of its input."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return cat([x, self.module(x)], dim=1)


def network(
    first: int,
    second: int,
    depths: tuple[int, int] = (1, 1),
    more: int = 0,
    beside: tuple[int, int] = (0, 0),
) -> nn.Module:
    """Makes two blocks with these channels and numbers of convolutions, and ``more`` channels for the head.

    Beside each block is a branch with ``beside`` hidden channels, none if that is 0; it reads what the block reads.
    """
    layers: list[nn.Module] = []
    channels = 1
    for width, depth, hidden in zip((first, second), depths, beside, strict=True):
        block: nn.Module = nn.Sequential(
            *(
                convolution(channels if number == 0 else width, width)
                for number in range(depth)
            )
        )
        if hidden:
            block = WithBranch(
                block,
                nn.Sequential(
                    convolution(channels, hidden), nn.Conv2d(hidden, width, 1)
                ),
            )
        layers += [block, nn.MaxPool2d(2)]
        channels = width
    if more:
        layers.insert(-1, WithInput(convolution(channels, more)))
        channels += more
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)
    )


class WithBranch(nn.Module):
    """The sum of two modules with the same input."""

    def __init__(self, main: nn.Module, branch: nn.Module) -> None:
        super().__init__()
        self.main, self.branch = main, branch

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x) + self.branch(x)


def with_branch() -> nn.Module:
    """Makes the host of `digits` with a branch of 4 channels from the image to the output of its second block."""
    host = network(3, 6)
    blocks = nn.Sequential(*host[:3])
    branch = nn.Sequential(
        convolution(1, 4), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1)
    )
    return nn.Sequential(nn.Identity(), WithBranch(blocks, branch), *host[3:])


def layers(inputs: int, hidden: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


def table_network(
    width: int, behind: int = 0, beside: int = 0, around: int = 0
) -> nn.Module:
    """Makes an MLP with two hidden layers, and hidden units behind or beside its first, or around all layers."""
    first: nn.Module = nn.Sequential(nn.Linear(64, width), nn.ReLU())
    if beside:
        first = WithBranch(first, layers(64, beside, width))
    if behind:
        first = nn.Sequential(
            first, WithBranch(nn.Identity(), layers(width, behind, width))
        )
    rest = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    whole = nn.Sequential(first, rest)
    return nn.Sequential(
        nn.Identity(), WithBranch(whole, layers(64, around, 10)) if around else whole
    )


DIGITS: dict[str, Callable[[], nn.Module]] = {
    "widths 3 and 6, the host": lambda: network(3, 6),
    "widths 2 and 16": lambda: network(2, 16),
    "widths 3 and 12": lambda: network(3, 12),
    "widths 4 and 9": lambda: network(4, 9),
    "widths 5 and 8": lambda: network(5, 8),
    "widths 6 and 6": lambda: network(6, 6),
    "widths 8 and 4": lambda: network(8, 4),
    "deeper first block": lambda: network(3, 6, (2, 1)),
    "deeper second block": lambda: network(3, 6, (1, 2)),
    "wider for the head, by 4": lambda: network(3, 6, more=4),
    "branch of 10 channels beside the second block": lambda: network(
        3, 6, beside=(0, 10)
    ),
    "branches of 8 and 6 channels beside both blocks": lambda: network(
        3, 6, beside=(8, 6)
    ),
    "branch of 4 channels from the image": with_branch,
}
TABLE: dict[str, Callable[[], nn.Module]] = {
    "width 8, the host": lambda: table_network(8),
    "width 11": lambda: table_network(11),
    "deeper by 16 units behind the first layer": lambda: table_network(8, behind=16),
    "branch of 4 units beside the first layer": lambda: table_network(8, beside=4),
    "branch of 4 units around all layers": lambda: table_network(8, around=4),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=("digits", "digits_table"))
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--seed", type=int, default=777)
    arguments = parser.parse_args()
    images = arguments.task == "digits"
    task, shapes = (digits.load(), DIGITS) if images else (digits.load_table(), TABLE)
    topology, site = ("cnn", "1") if images else ("mlp", "0")
    config = TrainingConfig.parse({"run": {"controller": "none"}})
    print("| host | parameters | test % | ± |\n|---|---|---|---|")
    for name, make in shapes.items():

        def host(make: Callable[[], nn.Module] = make) -> Host:
            return esper.graft(make(), {"r0c0": site}, topology=topology)

        _, _, test = train(
            EnvMaker.of(config, replace(task, name="shaped", build_host=host)),
            {},
            arguments.hosts,
            arguments.seed,
        )
        parameters = sum(parameter.numel() for parameter in make().parameters())
        error = test.std(ddof=1) / np.sqrt(arguments.hosts)
        print(
            f"| {name} | {parameters} | {test.mean():.2f} | {error:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
