"""Does a transformer that is deepened while it trains beat a deep one, at the same compute?

    python benchmarks/depth.py chars --steps 160 --steps 480 --steps 1440
    python benchmarks/depth.py code --width 32 --steps 7000 --every 200 --hosts 8 --rate deep=0.004 --save depth.jsonl

Character models on the tasks `chars` and `code`, by validation loss: with twice the layers from the start (`deep`),
with half of them throughout (`shallow`), and with half of them until a share of the compute is spent (``--at``), when a
copy of all blocks with its optimizer state is put on top (`stacked`, by ``env.at_once``). ``--steps`` is the number of
steps of the deep one; the others make as many more as their forward passes cost less, of all matrix products with the
head's. Each arm has its own cosine schedule, and may have a learning rate of its own, and trains the same hosts.

Prints losses and paired differences as Markdown. ``--save FILE`` adds a line for each arm that has ended to the file,
and an arm that the file has is not trained again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import no_grad
from torch.utils.flop_counter import FlopCounterMode

from esper.agents.script import ScheduleEntry, ScriptedController
from esper.compare.statistics import Floats, compare_pairs
from esper.config import TrainingConfig
from esper.core.state import Baseline
from esper.data.task import Task
from esper.env.make import EnvMaker
from esper.hosts.host import Host
from esper.hosts.transformer import TransformerHost

ARMS = ("deep", "stacked", "shallow")


def host_of(task: Task, width: int, layers: int) -> TransformerHost:
    """Makes a host with one slot, behind the last layer."""
    like = task.build_host()
    assert isinstance(like, TransformerHost)
    assert task.classes is not None
    return TransformerHost(
        task.classes, width, layers, like.heads, block=task.sample.shape[1], slots=1
    )


def flops_of(host: Host, task: Task) -> int:
    """Returns the floating-point operations of a forward pass of one sample."""
    counter = FlopCounterMode(display=False)
    with counter, no_grad():
        host.eval()(task.sample[:1])
    return int(counter.get_total_flops())


def losses(
    maker: EnvMaker,
    build: Callable[[], Host],
    epochs: int,
    stacked_after: int | None,
    seed: int,
) -> Floats:
    """Trains hosts for ``epochs``; returns their validation losses, nats [n]."""
    config = maker.config.with_values(env={"episode_length": epochs})
    env = EnvMaker(config, maker.task).with_hosts(build).make()
    flat = (0.0,) * (epochs + 1)
    env.configure(baseline=Baseline(flat, flat, 1.0, 1))  # no reward is read
    with closing(env):
        entry = {"op": "GERMINATE", "slot": "r0c0", "blueprint": "stack"}
        schedule = (
            []
            if stacked_after is None
            else [ScheduleEntry(epoch=stacked_after, **entry)]
        )
        controller = ScriptedController(
            schedule, env.action_spec, env.layout, env.num_envs
        )
        observation, info = env.reset(seed=seed)
        controller.begin()
        while not env.done.all():
            observation, *_, info = env.step(
                controller.act(observation, info["action_mask"])
            )
        assert env.state.slots.fossil.all() == (stacked_after is not None)
        assert not env.state.rollbacks.any(), "no host was rolled back"
        return env.state.committed_loss.copy()


def read_options() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("task", choices=("chars", "code"))
    parser.add_argument(
        "--steps", type=int, action="append", required=True, help="of the deep model"
    )
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument(
        "--layers", type=int, default=4, help="of the deep model, an even number"
    )
    parser.add_argument("--batch", type=int, default=32, help="sequences in a step")
    parser.add_argument(
        "--every",
        type=int,
        default=20,
        help="steps between validations, after which an env may act",
    )
    parser.add_argument(
        "--at",
        type=float,
        default=1 / 3,
        help="share of the compute before the copy is put on",
    )
    parser.add_argument(
        "--rate",
        action="append",
        default=[],
        help="learning rate of an arm, as deep=0.004",
    )
    parser.add_argument("--arm", action="append", choices=ARMS, help="only these")
    parser.add_argument("--hosts", type=int, default=5)
    parser.add_argument("--seed", type=int, default=9000)
    parser.add_argument(
        "--lanes", type=int, default=1, help="hosts that train at the same time"
    )
    parser.add_argument("--save", type=Path)
    return parser.parse_args()


def config_of(options: argparse.Namespace, rate: float | None) -> TrainingConfig:
    """Returns the config of one arm, whose length is still open."""
    task: dict[str, Any] = {
        "name": options.task,
        "warmup_epochs": 40 / options.every,
        "batch_size": options.batch,
        "samples_per_epoch": options.every * options.batch,
    }
    if rate is not None:
        task["learning_rate"] = rate
    env = {"n_envs": options.hosts, "at_once": True, "baseline_episodes": 1}
    run = {"controller": "none", "lanes": options.lanes}
    return TrainingConfig.parse({"task": task, "run": run, "env": env})


def main() -> None:
    """Run all arms at all budgets."""
    options = read_options()
    rates = {
        name: float(rate) for name, rate in (each.split("=") for each in options.rate)
    }
    saved = (
        options.save.read_text().splitlines()
        if options.save is not None and options.save.exists()
        else []
    )
    done = {
        json.dumps(entry["arm"]): entry["losses"] for entry in map(json.loads, saved)
    }
    first = EnvMaker.of(config_of(options, None))
    task = first.task
    assert task is not None
    deep = partial(host_of, task, options.width, options.layers)
    shallow = partial(host_of, task, options.width, options.layers // 2)
    ratio = flops_of(deep(), task) / flops_of(shallow(), task)
    print(
        f"{task.name}: {options.layers // 2} and {options.layers} layers of {options.width}, {options.hosts} hosts;"
    )
    print(
        f"a pass of the deep model costs {ratio:.2f} times one of the shallow model.\n"
    )
    print("| steps of the deep model | arm | rate | steps | loss | minus deep |")
    print("|---|---|---|---|---|---|")
    for steps in options.steps:
        budget = steps / options.every
        before = round(budget * options.at * ratio)
        arms = {
            "deep": (deep, round(budget), None),
            "stacked": (shallow, before + round(budget * (1 - options.at)), before),
            "shallow": (shallow, round(budget * ratio), None),
        }
        found: dict[str, Floats] = {}
        for name in options.arm or ARMS:
            build, epochs, stacked_after = arms[name]
            settings = {
                key: value
                for key, value in vars(options).items()
                if key not in ("steps", "rate", "arm", "save", "lanes")
            }
            key = {**settings, "steps": steps, "arm": name, "rate": rates.get(name)}
            if json.dumps(key) not in done:
                maker = EnvMaker.of(config_of(options, rates.get(name)), task)
                done[json.dumps(key)] = losses(
                    maker, build, epochs, stacked_after, options.seed
                ).tolist()
                if options.save is not None:
                    with options.save.open("a") as file:
                        file.write(
                            json.dumps({"arm": key, "losses": done[json.dumps(key)]})
                            + "\n"
                        )
            found[name] = np.array(done[json.dumps(key)])
            difference = ""
            if name != "deep" and "deep" in found:
                pair = compare_pairs(found[name], found["deep"])
                low, high = pair.interval
                difference = f"{pair.difference:+.3f} [{low:+.3f}, {high:+.3f}]"
            rate = rates.get(name, first.config.task.learning_rate)
            print(
                f"| {steps} | {name} | {rate:g} | {epochs * options.every} | {found[name].mean():.3f} | {difference} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
