"""A Grower in a plain loop against the vector env on the same hosts of `digits`.

    python benchmarks/grower_on_digits.py --hosts 16 --incubation ste

Every host is trained four times from the same weights on the same batches for the task's episode, with its optimizer
and schedule: grown and alone, in the env and in a plain loop. Seeds start with the same weights in both. Printed is the
gain in test accuracy by growing in each of them, and the difference of the two with its 95 % interval over hosts.
"""

from __future__ import annotations

import argparse
import copy
from functools import partial
from typing import Literal

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from esper.agents.make import OwnController, controller_for
from esper.config import TrainingConfig
from esper.data.digits import load
from esper.data.split import Split
from esper.data.task import resolve
from esper.env.vector_env import GrowthVectorEnv
from esper.grower.grower import Grower
from esper.hosts.cnn import CNNHost
from esper.run.rollout import one_thread, play_round
from esper.training.rng import RngStream, derive_seed

TASK = {
    "name": "digits",
    "learning_rate": 0.05,
    "warmup_epochs": 0.0,
    "weight_decay": 5e-4,
    "label_smoothing": 0.0,
}
"""Settings that a plain loop of a few lines can follow."""
ENV = {"slots": ["r0", "r1"], "at_once": False}
"""Slots that are outputs of submodules of :class:`PlainLoop`."""


def inputs_of(split: Split) -> tuple[Tensor, Tensor]:
    return split.inputs(0, len(split), torch.float32), split.y


class PlainLoop:
    """The task's training written as a plain loop: SGD with momentum, clipping, a cosine by epochs.

    ``seed`` and ``env`` give the batches of that env in its first episode.
    """

    def __init__(
        self,
        host: CNNHost,
        config: TrainingConfig,
        epochs: int,
        seed: int,
        env: int = 0,
    ) -> None:
        task = load()
        self.sites = {site.name: str(i) for i, site in enumerate(host.sites)}
        self.host = nn.Sequential(*host.segments)
        self.epochs, self.config = epochs, resolve(config, task).task
        self.x, self.y = inputs_of(task.train)  # type: ignore[arg-type]
        self.validation, self.test = inputs_of(task.validation), inputs_of(task.test)
        self.batch = config.task.batch_size or task.batch_size
        self.optimizer = torch.optim.SGD(
            self.host.parameters(),
            self.config.learning_rate or task.learning_rate,
            momentum=self.config.momentum,
            weight_decay=self.config.weight_decay,
        )
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, epochs
        )
        self.shadowed: Grower | None = None
        self.order = torch.Generator().manual_seed(
            derive_seed(seed, env, 0, RngStream.DATA)
        )

    def epoch(self) -> None:
        self.host.train()
        rows = torch.randperm(len(self.x), generator=self.order)
        for part in rows[: len(rows) // self.batch * self.batch].split(self.batch):
            self.optimizer.zero_grad()
            self.loss(part).backward()  # type: ignore[no-untyped-call]
            if self.shadowed is not None:
                self.shadowed.incubate(partial(self.loss, part))
            nn.utils.clip_grad_norm_(self.host.parameters(), self.config.max_grad_norm)
            self.optimizer.step()
        self.scheduler.step()

    def loss(self, rows: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.host(self.x[rows]), self.y[rows])

    def evaluate(self, host: nn.Module) -> tuple[Tensor, Tensor]:
        host.eval()
        logits = host(self.validation[0])
        return (
            logits.argmax(1) == self.validation[1]
        ).double(), nn.functional.cross_entropy(logits, self.validation[1])

    def grower(
        self,
        controller: str | OwnController,
        incubation: Literal["ste", "shadow"],
        config: TrainingConfig,
    ) -> Grower:
        grower = Grower(
            self.host,
            self.sites,
            self.optimizer,
            controller,
            self.epochs,
            incubation=incubation,
            scheduler=self.scheduler,
            config=config,
        )
        self.shadowed = grower if incubation == "shadow" else None
        return grower

    def accuracy(self, network: nn.Module) -> float:
        network.eval()
        with torch.no_grad():
            return 100 * float(
                (network(self.test[0]).argmax(1) == self.test[1]).double().mean()
            )


def cnn(host: nn.Module) -> CNNHost:
    assert isinstance(host, CNNHost)
    return host


def in_env(env: GrowthVectorEnv, controller: str, seed: int) -> tuple[float, CNNHost]:
    """Returns the test accuracy of the env's host after an episode, pp, and a copy of the host before it."""
    env.reset(seed=seed)
    host = copy.deepcopy(cnn(env.training[0].host))
    play_round(env, controller_for(controller, env.config, env, seed), seed)
    return float(env.test_accuracy()[0]), host


def in_loop(
    host: CNNHost, controller: str, incubation: Literal["ste", "shadow"], seed: int
) -> float:
    """Returns the test accuracy of ``host`` after the same epochs in a plain loop, pp."""
    config = TrainingConfig().with_values(task=TASK, env=ENV, run={"seed": seed})
    epochs = load().episode_length
    loop = PlainLoop(copy.deepcopy(host), config, epochs, seed)
    if controller == "none":
        for _ in range(epochs):
            loop.epoch()
        return loop.accuracy(loop.host)
    grower = loop.grower(controller, incubation, config)
    grower.start(loop.evaluate)
    for _ in range(epochs):
        loop.epoch()
        grower.step(loop.evaluate)
    return loop.accuracy(grower.finish())


def compare(
    hosts: int, incubation: Literal["ste", "shadow"], controller: str, seed: int
) -> None:
    config = TrainingConfig().with_values(
        task=TASK,
        env={**ENV, "n_envs": 1, "baseline_episodes": 2, "incubation": incubation},
    )
    env = GrowthVectorEnv(load(), config)
    results = []  # of each host: grown and alone in the env, grown and alone in the loop
    for number in range(seed, seed + hosts):
        grown, host = in_env(env, controller, number)
        alone, _ = in_env(env, "none", number)
        results.append(
            (
                grown,
                alone,
                *(
                    in_loop(host, name, incubation, number)
                    for name in (controller, "none")
                ),
            )
        )
    env.close()
    grown, alone, loop_grown, loop_alone = np.array(results).T
    difference = (loop_grown - loop_alone) - (grown - alone)
    half = stats.t.ppf(0.975, hosts - 1) * difference.std(ddof=1) / np.sqrt(hosts)
    print(f"{hosts} hosts, {controller}, {incubation} incubation, test accuracy in pp")
    for name, a, b in (("env", alone, grown), ("loop", loop_alone, loop_grown)):
        print(
            f"{name}: alone {a.mean():.2f}, grown {b.mean():.2f}, gain {(b - a).mean():+.2f}"
        )
    low, high = difference.mean() - half, difference.mean() + half
    print(
        f"gain of the loop minus gain of the env: {difference.mean():+.2f} [{low:+.2f}, {high:+.2f}]"
    )


@one_thread()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--seed", type=int, default=20000, help="run seed of the hosts")
    parser.add_argument(
        "--incubation",
        choices=("shadow", "ste"),
        default="shadow",
        help="of env and loop",
    )
    parser.add_argument(
        "--controller", default="schedule:benchmarks/schedules/heavy_digits.toml"
    )
    arguments = parser.parse_args()
    compare(arguments.hosts, arguments.incubation, arguments.controller, arguments.seed)


if __name__ == "__main__":
    main()
