"""Is a host that is widened by seeds as good as the wider network, if both are trained from the start?

    python benchmarks/widened_hosts.py digits --pairs 300
    python benchmarks/widened_hosts.py mnist5k --pairs 40

Each host of a CNN task is trained three times, on the same batches and from equal weights where two have the same
layers: with a widening seed in every block (`static`), as the network whose blocks have as many channels (`wide`), and
as that network without the weights from the new channels of a block to those of the next one (`no block`), which two
widenings in a row lack as well. Prints the paired differences of test accuracies, as Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from esper.config import TrainingConfig
from esper.data.task import Task, resolve
from esper.env.make import EnvMaker
from esper.env.no_growth import no_growth_loop
from esper.env.training_backend import make_trainings
from esper.evaluation.statistics import Floats, compare_pairs
from esper.files.grown_host import assemble
from esper.hosts.cnn import CNNHost
from esper.hosts.grown import KeptSeed
from esper.hosts.host import Host
from esper.seeds.blueprints import BLUEPRINTS, source
from esper.training.execution.tiers import make_executor
from esper.training.host_trainer import HostTrainer

AT_ONCE = 20
"""Hosts that are in memory together."""


def widths_of(host: CNNHost, blueprint: str) -> list[int]:
    """Returns the channels of each block of ``host`` with that widening."""
    convolutions = [module for module in host.modules() if isinstance(module, nn.Conv2d)]
    return [layer.out_channels + source.units_of(source.SHARES[blueprint], layer) for layer in convolutions]


def static(task: Task, blueprint: str) -> Host:
    """Makes the task's host with a widening seed in every block."""
    host = task.new_host(["r2"])
    kept = {name: KeptSeed(blueprint, "LINEAR_ADD", 1.0) for name in host.slot_names}
    return assemble(host, kept, {name: BLUEPRINTS.get("cnn", blueprint) for name in kept}, task.name)


def wide(task: Task, blueprint: str) -> CNNHost:
    """Makes the host whose blocks have the channels of the widened one."""
    host = task.build_host()
    assert isinstance(host, CNNHost)
    made = host.of_width(host.width, widths=widths_of(host, blueprint))
    assert isinstance(made, CNNHost)
    return made


def without_block(task: Task, blueprint: str) -> CNNHost:
    """Makes the wide host without the weights between new channels."""
    narrow, host = task.build_host(), wide(task, blueprint)
    pairs = list(zip(narrow.modules(), host.modules(), strict=True))
    for own, layer in pairs:
        if isinstance(layer, nn.Conv2d) and isinstance(own, nn.Conv2d) and own.in_channels < layer.in_channels:
            mask = torch.ones_like(layer.weight)
            mask[own.out_channels :, own.in_channels :] = 0
            layer.weight.data *= mask
            layer.weight.register_hook(lambda gradient, mask=mask: gradient * mask)
    return host


ARMS: dict[str, Callable[[Task, str], Host]] = {"static": static, "wide": wide, "no block": without_block}


def accuracies(maker: EnvMaker, task: Task, hosts: range, seed: int) -> Floats:
    """Trains hosts of ``task`` alone; returns their test accuracies, pp [n]."""
    config = resolve(maker.config, task)
    training = make_trainings([task] * len(hosts), [config] * len(hosts), hosts)
    with (
        make_executor(config.run, task.device) as executor,
        closing(HostTrainer(task, training, executor)) as trainer,
    ):
        loop, alone = no_growth_loop(trainer, training[0].host.slot_names)
        *_, state = loop.without_growth(seed)
        return alone.test_accuracy(state)


def main() -> None:
    """Run all arms on the same hosts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("task", help="a task whose hosts are CNNs")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=9000)
    parser.add_argument("--blueprint", default="widen_whole", choices=tuple(source.SHARES))
    options = parser.parse_args()
    maker = EnvMaker.of(TrainingConfig.parse({"task": {"name": options.task}, "run": {"controller": "none"}}))
    assert maker.task is not None
    task, results = maker.task, dict[str, Floats]()
    print(
        f"| arm of {options.pairs} hosts of {task.name}, {options.blueprint} | parameters | test % | static minus it |"
    )
    print("|---|---|---|---|")
    for name, make in ARMS.items():
        of_arm = replace(task, build_host=lambda make=make: make(task, options.blueprint))
        parts = [
            accuracies(maker, of_arm, range(first, min(first + AT_ONCE, options.pairs)), options.seed)
            for first in range(0, options.pairs, AT_ONCE)
        ]
        results[name] = np.concatenate(parts)
        size = of_arm.build_host().parameter_count
        pair = compare_pairs(results["static"], results[name])
        low, high = pair.interval
        difference = "" if name == "static" else f"{pair.difference:+.2f} [{low:+.2f}, {high:+.2f}]"
        print(f"| `{name}` | {size} | {results[name].mean():.2f} | {difference} |", flush=True)


if __name__ == "__main__":
    main()
