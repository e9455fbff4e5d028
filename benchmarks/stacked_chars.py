"""Does a transformer that is deepened while it trains beat a deep one, at the same compute?

    python benchmarks/stacked_chars.py --steps 160 --steps 480 --steps 1440

Character models on the task `chars`, by validation loss: with twice the layers from the start (`deep`), with half of
them throughout (`shallow`), and with half of them until a third of the compute is spent, when a copy of all blocks with
its optimizer state is put on top (`stacked`, by ``env.at_once``). ``--steps`` is the number of steps of the deep one;
the others make as many more as their forward passes cost less, of all matrix products with the head's. Each arm has its
own cosine schedule, and trains the same hosts, one a seed. Prints losses and paired differences as Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing
from functools import partial

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from esper.config import TrainingConfig
from esper.control.script import ScheduleEntry, ScriptedController
from esper.data.task import Task
from esper.env.make import EnvMaker
from esper.evaluation.statistics import Floats, compare_pairs
from esper.hosts.host import Host
from esper.hosts.transformer import TransformerHost

EPOCH, BATCH = 20, 32
"""Steps in an epoch, after which an env may act, and samples in a step."""


def host_of(like: TransformerHost, task: Task, layers: int) -> TransformerHost:
    """Makes a host with other ``layers`` and one slot, behind the last one."""
    assert task.classes is not None
    block = task.sample.shape[1]
    return TransformerHost(task.classes, like.width, layers=layers, heads=like.heads, block=block, slots=1)


def flops_of(host: Host, task: Task) -> int:
    """Returns the floating-point operations of a forward pass of one sample."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        host.eval()(task.sample[:1])
    return int(counter.get_total_flops())


def losses(maker: EnvMaker, build: Callable[[], Host], epochs: int, stacked_after: int | None, seed: int) -> Floats:
    """Trains hosts for ``epochs``; returns their validation losses, nats [n]."""
    config = maker.config.with_values(env={"episode_length": epochs})
    env = EnvMaker(config, maker.task).with_hosts(build).make()
    with closing(env):
        entry = {"op": "GERMINATE", "slot": "r0c0", "blueprint": "stack"}
        schedule = [] if stacked_after is None else [ScheduleEntry(epoch=stacked_after, **entry)]
        controller = ScriptedController(schedule, env.action_spec, env.layout, env.num_envs)
        observation, info = env.reset(seed=seed)
        controller.begin()
        while not env.done.all():
            observation, *_, info = env.step(controller.act(observation, info["action_mask"]))
        assert env.state.slots.fossil.all() == (stacked_after is not None)
        assert not env.state.rollbacks.any(), "no host was rolled back"
        return env.state.committed_loss.copy()


def main() -> None:
    """Run all arms at all budgets."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, action="append", required=True)
    parser.add_argument("--layers", type=int, default=4, help="of the deep model, an even number")
    parser.add_argument("--hosts", type=int, default=5)
    parser.add_argument("--seed", type=int, default=9000)
    options = parser.parse_args()
    tables = {
        "task": {"name": "chars", "warmup_epochs": 2.0, "batch_size": BATCH, "samples_per_epoch": EPOCH * BATCH},
        "run": {"controller": "none"},
        "env": {"n_envs": options.hosts, "at_once": True, "baseline_episodes": 1},
    }
    maker = EnvMaker.of(TrainingConfig.parse(tables))
    maker = EnvMaker(
        maker.config.with_values(task={"samples_per_epoch": EPOCH * maker.config.task.batch_size}), maker.task
    )
    task = maker.task
    assert task is not None
    like = task.build_host()
    assert isinstance(like, TransformerHost)
    deep = partial(host_of, like, task, options.layers)
    shallow = partial(host_of, like, task, options.layers // 2)
    ratio = flops_of(deep(), task) / flops_of(shallow(), task)
    print(f"{options.layers // 2} and {options.layers} layers of {like.width}, {options.hosts} hosts;")
    print(f"a pass of the deep model costs {ratio:.2f} times one of the shallow model.\n")
    print("| steps of the deep model | arm | steps | loss | minus deep |")
    print("|---|---|---|---|---|")
    for steps in options.steps:
        budget = steps / EPOCH
        first = round(budget / 3 * ratio)
        arms = {
            "deep": (deep, round(budget), None),
            "stacked": (shallow, first + round(budget * 2 / 3), first),
            "shallow": (shallow, round(budget * ratio), None),
        }
        found = {name: losses(maker, *arm, options.seed) for name, arm in arms.items()}
        for name, (_, epochs, _) in arms.items():
            pair = compare_pairs(found[name], found["deep"])
            low, high = pair.interval
            difference = "" if name == "deep" else f"{pair.difference:+.3f} [{low:+.3f}, {high:+.3f}]"
            print(f"| {steps} | {name} | {epochs * EPOCH} | {np.mean(found[name]):.3f} | {difference} |", flush=True)


if __name__ == "__main__":
    main()
