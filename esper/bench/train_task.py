"""Cases of `train-task`: the hosts of any task, as it trains them, against the same hosts alone in tuned PyTorch.

Once an epoch without growth, and once a whole step in which hosts grow: training with seeds, all validations, gates and
the controller's decisions.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from esper.agents.make import controller_for
from esper.bench.case import BenchArgs, BenchCase, Size, Sizes
from esper.bench.fixtures import growth_env
from esper.bench.plain import LR
from esper.bench.tuned import Recipe, TunedTraining
from esper.config import ConfigError, Optimizer
from esper.data.split import Split
from esper.data.task import Task
from esper.data.tasks import load_task
from esper.hosts.host import Host
from esper.rollout.rollout import Rollout
from esper.rollout.threads import one_thread
from esper.training.precision import concrete

NAME = "train-task"
SIZES = Sizes("ENVSxBATCH", ((4, 128),), seconds=35.0)
SAMPLES = 5120
"""Max training samples of an epoch."""
HORIZON = 30
"""Epochs of an episode of growth, in which turns follow one another; then the next one begins."""
CONTROLLER = "heuristic"
RATES = {"sgd": LR, "adamw": 0.003}
"""Learning rates with an optimizer that is not the task's: hosts that diverge are rolled back, which takes time."""


@dataclass(frozen=True)
class HostOf:
    """Makes hosts of a task, which another process can load by its name."""

    task: str

    def __call__(self) -> Host:
        return load_task(self.task).build_host()


def comparisons(args: BenchArgs) -> Iterator[BenchCase]:
    """Yields samples per second of an epoch and of a growing step of hosts of ``args.task``, at each size.

    Raises ConfigError for a task whose data is not in memory, or whose loss is another than cross-entropy.
    """
    for device, size in SIZES.of(args):
        yield from _speed(args, size, device)


def _speed(args: BenchArgs, size: Size, device: torch.device) -> Iterator[BenchCase]:
    envs, batch = size
    task = short(load_task(args.task).to(device), batch, args.quick)
    optimizer: Optimizer = args.optimizer or task.optimizer
    settings: dict[str, Any] = {
        "optimizer": optimizer,
        "precision": args.precision or task.precision,
    }
    if optimizer != task.optimizer:
        settings["learning_rate"] = RATES[optimizer]
    recipe = Recipe(HostOf(args.task), optimizer)
    if args.precision is not None:
        dtype = getattr(torch, concrete(args.precision, device))
        recipe = replace(recipe, precisions=(dtype,))
    assert isinstance(task.train, Split)
    with (
        closing(TunedTraining(recipe, envs, task.train, batch, compiles=not args.quick)) as tuned,
        growth_env(task, envs, batch, horizon=HORIZON, **settings) as alone,
        growth_env(task, envs, batch, horizon=HORIZON, **settings) as growing,
    ):
        controller = controller_for(CONTROLLER, growing.config, growing, run_seed=0)
        rollout = Rollout(growing, controller)

        def epoch() -> None:
            with one_thread():
                alone.local.trainer.epoch(alone.training)

        def step() -> None:
            with one_thread():
                if not rollout.begun or rollout.over:
                    rollout.begin(0)
                rollout.step()

        samples = len(task.train)
        sides = {NAME: epoch, f"{NAME}: a step of growth by {CONTROLLER}": step}
        for case, ours in sides.items():
            yield BenchCase(
                case=case,
                size=f"{args.task}, E {envs}, batch {batch}, {optimizer}, {samples:,} samples",
                device=device,
                baseline=tuned.name,
                run=ours,
                run_baseline=tuned.epoch,
                unit="samples/s",
                amount=envs * samples,
                turns=HORIZON,
            )


def short(task: Task, batch: int, quick: bool) -> Task:
    """Returns the task with a few full batches of its training samples, for hosts of equal work.

    Raises ConfigError for a task that the baseline cannot train.
    """
    train = task.train
    if not isinstance(train, Split) or not isinstance(train.x, Tensor) or task.loss != "cross_entropy":
        raise ConfigError(
            f"{NAME} trains tasks with data in memory and the loss cross_entropy, and {task.name} is another"
        )
    samples = batch
    if not quick:
        samples = min(len(train), SAMPLES) // batch * batch
    if samples == 0:
        raise ConfigError(f"{NAME}: {task.name} has {len(train)} training samples, fewer than a batch of {batch}")
    few = Split(train.x[:samples], train.y[:samples], train.table)
    return replace(task, train=few, samples_per_epoch=None)
