"""Is a host that is widened by seeds as good as the wider network, if both are trained from the start?

    python benchmarks/widened_hosts.py digits --pairs 300
    python benchmarks/widened_hosts.py mnist5k --pairs 40
    python benchmarks/widened_hosts.py digits --pairs 40 --first-epoch 1 --first-epoch 3 --first-epoch 5
    python benchmarks/widened_hosts.py digits --pairs 40 --seed 7000 --first-epoch 5 --seed-rate 1,0 --seed-rate 2,0

Each host of a CNN task, or of `digits_table`, is trained three times, on the same batches and from equal weights where
two have the same layers: with a widening seed in every block or hidden layer (`static`), as the network whose layers
have as many units (`wide`), and as that network without the weights from the new units of a layer to those of the next
one (`no block`), which two widenings in a row lack as well. ``--first-epoch`` adds hosts that are widened while they
train: the first layer after that number of epochs, each other layer one epoch after the one before it
(``env.at_once``). ``--seed-rate`` gives the new units another learning rate, and epochs of warm-up. Prints the paired
differences of test accuracies to the first arm, and the floating-point operations of training in units of those of the
wide network, as Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from esper.agents.script import ScheduleEntry, ScriptedController
from esper.compare.statistics import Floats, compare_pairs
from esper.config import TrainingConfig
from esper.core.blueprints import BLUEPRINTS, source
from esper.data import digits
from esper.data.task import Task, resolve
from esper.env.make import EnvMaker
from esper.env.no_growth import no_growth_loop
from esper.files.grown_host import assemble
from esper.hosts.cnn import CNNHost
from esper.hosts.grown import KeptSeed
from esper.hosts.host import Host
from esper.training.execution.tiers import make_executor
from esper.training.host_trainer import HostTrainer, make_trainings

AT_ONCE = 20
"""Hosts that are in memory together."""


def layers_of(host: Host) -> list[nn.Conv2d | nn.Linear]:
    """Returns the layers of ``host`` with weights, the head last."""
    return [
        module for module in host.modules() if isinstance(module, nn.Conv2d | nn.Linear)
    ]


def width_of(layer: nn.Conv2d | nn.Linear) -> int:
    """Returns the number of units of ``layer``."""
    return int(layer.weight.shape[0])


def widths_of(host: Host, blueprint: str) -> list[int]:
    """Returns the units of each layer of ``host`` but the head with that widening."""
    return [
        width_of(layer) + source.units_of(source.SHARES[blueprint], layer)
        for layer in layers_of(host)[:-1]
    ]


def static(task: Task, blueprint: str) -> Host:
    """Makes the task's host with a widening seed in every block."""
    host = task.new_host(["r2"])
    host.probe(task.sample)
    kept = {name: KeptSeed(blueprint, "LINEAR_ADD", 1.0) for name in host.slot_names}
    return assemble(
        host, kept, {name: BLUEPRINTS.get("cnn", blueprint) for name in kept}, task.name
    )


def wide(task: Task, blueprint: str) -> Host:
    """Makes the host whose layers have the units of the widened one."""
    host = task.build_host()
    widths = widths_of(host, blueprint)
    if isinstance(host, CNNHost):
        return host.of_width(host.width, widths=widths)
    assert task.name == "digits_table", "a CNN, or the MLP of digits_table"
    return digits.mlp_of_widths(*widths)


def without_block(task: Task, blueprint: str) -> Host:
    """Makes the wide host without the weights between new channels."""
    narrow, host = task.build_host(), wide(task, blueprint)
    for own, layer in zip(layers_of(narrow), layers_of(host), strict=True):
        units, inputs = own.weight.shape[:2]
        if inputs < layer.weight.shape[1]:
            mask = torch.ones_like(layer.weight)
            mask[units:, inputs:] = 0
            layer.weight.data *= mask
            layer.weight.register_hook(lambda gradient, mask=mask: gradient * mask)
    return host


ARMS: dict[str, Callable[[Task, str], Host]] = {
    "static": static,
    "wide": wide,
    "no block": without_block,
}


def accuracies(maker: EnvMaker, task: Task, hosts: range, seed: int) -> Floats:
    """Trains hosts of ``task`` alone; returns their test accuracies, pp [n]."""
    config = resolve(maker.config, task)
    training = make_trainings([task] * len(hosts), [config] * len(hosts), hosts)
    with (
        make_executor(config.run, task.device) as executor,
        closing(HostTrainer(task, training, executor)) as trainer,
    ):
        loop, alone = no_growth_loop(trainer)
        *_, state = loop.without_growth(seed)
        return alone.test_accuracy(state)


def grown_accuracies(
    maker: EnvMaker, first_epoch: int, blueprint: str, pairs: int, seed: int
) -> Floats:
    """Grows the task's hosts by a block each epoch, from ``first_epoch`` on; returns their test accuracies, pp [n]."""
    env = maker.make(pairs)
    with closing(env):
        schedule = []
        for epoch, slot in enumerate(env.action_spec.slots, first_epoch):
            seed_of_slot = {"op": "GERMINATE", "slot": slot, "blueprint": blueprint}
            schedule.append(ScheduleEntry(epoch=epoch, **seed_of_slot))
        controller = ScriptedController(schedule, env.action_spec, env.layout, pairs)
        observation, info = env.reset(seed=seed)
        controller.begin()
        while not env.done.all():
            observation, *_, info = env.step(
                controller.act(observation, info["action_mask"])
            )
        assert bool(env.state.slots.fossil.all()), "each host has all its widenings"
        return env.backend.test_accuracy(env.state)


def flops_of(host: Host, task: Task) -> int:
    """Returns the floating-point operations of a forward pass of one sample, of convolutions and matrix products."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        host.eval()(task.sample[:1])
    return int(counter.get_total_flops())


def main() -> None:
    """Run all arms on the same hosts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("task", help="a task whose hosts are CNNs, or digits_table")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=9000)
    parser.add_argument(
        "--blueprint", default="widen_whole", choices=tuple(source.SHARES)
    )
    parser.add_argument(
        "--first-epoch",
        type=int,
        action="append",
        default=[],
        help="of an arm that is grown",
    )
    parser.add_argument(
        "--seed-rate",
        action="append",
        help="of the grown arms, and epochs of warm-up: 2,0.5",
    )
    options = parser.parse_args()
    tables = {"task": {"name": options.task}, "run": {"controller": "none"}}
    tables["env"] = {"slots": ["r2"], "at_once": True, "baseline_episodes": 1}
    maker = EnvMaker.of(TrainingConfig.parse(tables))
    task, results = maker.task, dict[str, Floats]()
    assert task is not None
    made = {name: make(task, options.blueprint) for name, make in ARMS.items()}
    narrow, whole, horizon = (
        task.build_host(),
        flops_of(made["wide"], task),
        maker.config.env.episode_length,
    )
    print(f"{options.pairs} hosts of {task.name}, {options.blueprint}:\n")
    print("| arm | parameters | FLOPs | test % | first arm minus it |")
    print("|---|---|---|---|---|")

    def show(name: str, size: int, share: float) -> None:
        pair = compare_pairs(results["static"], results[name])
        low, high = pair.interval
        difference = (
            ""
            if name == "static"
            else f"{pair.difference:+.2f} [{low:+.2f}, {high:+.2f}]"
        )
        print(
            f"| {name} | {size} | {share:.2f} | {results[name].mean():.2f} | {difference} |",
            flush=True,
        )

    for name, make in ARMS.items():
        of_arm = replace(
            task, build_host=lambda make=make: make(task, options.blueprint), slots=None
        )
        plain = replace(maker, config=maker.config.with_values(env={"slots": None}))
        parts = []
        for first in range(0, options.pairs, AT_ONCE):
            hosts = range(first, min(first + AT_ONCE, options.pairs))
            parts.append(accuracies(plain, of_arm, hosts, options.seed))
        results[name] = np.concatenate(parts)
        show(name, made[name].parameter_count, flops_of(made[name], task) / whole)
    for first, text in product(options.first_epoch, options.seed_rate or ["1,0"]):
        rate, rise = map(float, text.split(","))
        name = f"grown from epoch {first} on" + (
            f", rate {rate:g}, warm-up {rise:g}" if options.seed_rate else ""
        )
        own = replace(
            maker,
            config=maker.config.with_values(
                task={"seed_rate": rate, "seed_warmup_epochs": rise}
            ),
        )
        results[name] = grown_accuracies(
            own, first, options.blueprint, options.pairs, options.seed
        )
        blocks = len(made["static"].slot_names)
        step = (flops_of(made["static"], task) - flops_of(narrow, task)) / blocks
        waiting = sum(first + number for number in range(blocks)) * step / horizon
        show(
            name,
            made["static"].parameter_count,
            (flops_of(made["static"], task) - waiting) / whole,
        )


if __name__ == "__main__":
    main()
