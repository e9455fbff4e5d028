"""Cases of hosts in training, against the same hosts in PyTorch; and of their validation."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from esper.agents.make import controller_for
from esper.bench.baselines import LR, Epoch, Workload, plain_cnn, tuned
from esper.bench.case import BenchArgs, BenchPair, Case, Size
from esper.bench.fixtures import BLOCKS, CHANNELS, CLASSES, SIDE, VALIDATION, growth_env, image_task
from esper.config import ConfigError, Optimizer
from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import STYLES
from esper.core.site import Role
from esper.data.split import Split
from esper.data.task import Task
from esper.data.tasks import build_host, load_task
from esper.env.vector_env import GrowthVectorEnv
from esper.hosts.plain import plain
from esper.run.rollout import Rollout, one_thread
from esper.training.counterfactual import CounterfactualHelper
from esper.training.host_training import HostTraining
from esper.training.precision import concrete
from esper.training.validate import evaluate

# train-epoch: images per second of an epoch of many hosts.

# Min ratios to the tuned baseline. On CUDA it replays a graph of each host side by side, as Esper does, so the bar is
# "not slower". On a CPU with AVX-512, of which oneDNN makes more use, 2.5 is enough for the first.
BARS: dict[tuple[str, Size], float] = {
    ("cpu", (4, 128, 8)): 3.0,
    ("cpu", (4, 32, 8)): 3.0,
    ("cpu", (4, 128, 32)): 1.5,
    ("cuda", (8, 128, 8)): 1.0,
    ("cuda", (8, 512, 32)): 1.0,
}
FULL = 5120
"""Max samples per epoch and env."""


def samples_of(size: Size, device: torch.device, quick: bool) -> int:
    """Returns the samples per epoch and env: full batches, few enough that a turn on a CPU takes about a second."""
    envs, batch, width = size
    if quick:
        return batch
    wanted = FULL
    if device.type == "cpu":
        wanted = min(FULL, 80_000 // (envs * width))
    return max(2, wanted // batch) * batch


def train_epoch(args: BenchArgs, device: torch.device, size: Size) -> Iterator[BenchPair]:
    """Yields the rate of an epoch of synthetic images against tuned PyTorch."""
    envs, batch, width = size
    samples = samples_of(size, device, args.quick)
    task = image_task(samples, width, device, validation=batch)
    work = workload(task.train, partial(plain_cnn, CHANNELS, CLASSES, width, BLOCKS), envs, batch)
    bar = None
    if not args.quick:
        bar = BARS.get((device.type, size))
    with tuned(work, compiles=not args.quick) as (name, tuned_epoch), growth_env(task, envs, batch) as env:
        yield BenchPair(
            case="train-epoch",
            size=f"E {envs}, batch {batch}, width {width}, {samples:,} samples of {SIDE} x {SIDE}",
            device=device,
            baseline=name,
            run=partial(train, env),
            run_baseline=tuned_epoch,
            bar=bar,
            unit="images/s",
            amount=envs * samples,
        )


def workload(data: Any, build: Callable[[], Any], hosts: int, batch: int) -> Workload:
    """Returns the work of the baselines: the same data, as networks see it."""
    assert isinstance(data, Split)
    return Workload(build, hosts, data.inputs(0, len(data)).contiguous(), data.y, batch)


def train(env: GrowthVectorEnv) -> None:
    """Trains every host for an epoch."""
    with one_thread():
        env.local.trainer.epoch(env.training)


# train-task, grow-task, workers: samples per second of the hosts of any task, as the task trains them.

HORIZON = 30
"""Epochs of an episode of growth, in which turns follow one another; then the next one begins."""
CONTROLLER = "heuristic"
RATES = {"sgd": LR, "adamw": 0.003}
"""Learning rates with an optimizer that is not the task's: hosts that diverge are rolled back, which takes time."""
TASK_BARS: dict[tuple[str, str, Size], float] = {
    ("train-task", "digits", (8, 128)): 10,
    ("train-task", "digits", (8, 64)): 10,
    ("train-task", "digits_table", (8, 32)): 8,
    ("train-task", "benchmarks/native_bars.py:mlp", (8, 32)): 8,
    ("grow-task", "digits", (8, 64)): 2,
    ("grow-task", "fashion_mnist", (4, 128)): 0.9,
    ("workers", "digits", (8, 64)): 1.8,
}
"""Min ratios on a CPU."""
WORKERS = 2


@dataclass(frozen=True)
class HostOf:
    """Makes hosts of a task, of ordinary modules only, which another process can load by its name."""

    task: str
    example: Tensor
    """A few inputs."""

    def __call__(self) -> nn.Module:
        return plain(build_host(self.task), self.example)


class TaskBench:
    """The hosts of a task at one size: those of Esper, and the work of the baseline.

    Raises ConfigError for a task that the baseline cannot train.
    """

    def __init__(self, args: BenchArgs, device: torch.device, size: Size) -> None:
        envs, batch = size
        self.envs = envs
        self.batch = batch
        self.task = short(load_task(args.task).to(device), self.batch, args.quick)
        assert isinstance(self.task.train, Split)
        example = self.task.train.inputs(0, 2).cpu()
        self.optimizer: Optimizer = args.optimizer or self.task.optimizer
        work = workload(self.task.train, HostOf(args.task, example), self.envs, self.batch)
        self.work = replace(work, optimizer=self.optimizer)
        self.settings: dict[str, Any] = {
            "optimizer": self.optimizer,
            "precision": args.precision or self.task.precision,
            "horizon": HORIZON,
        }
        if self.optimizer != self.task.optimizer:
            self.settings["learning_rate"] = RATES[self.optimizer]
        if args.precision is not None:
            self.work = replace(self.work, precisions=(getattr(torch, concrete(args.precision, device)),))
        self.tuned = partial(tuned, self.work, compiles=not args.quick)

    def hosts(self, lanes: int | None = None) -> AbstractContextManager[GrowthVectorEnv]:
        """Makes an env; ``lanes`` hosts train at the same time, by default as many as there are cores."""
        return growth_env(self.task, self.envs, self.batch, lanes=lanes, **self.settings)

    def pair(self, case: str, run: Epoch, baseline: str, run_baseline: Epoch, quick: bool) -> BenchPair:
        """Returns the comparison of two ways to train all hosts for an epoch."""
        name = self.task.name
        bar = None
        if self.task.device.type == "cpu" and not quick:
            bar = TASK_BARS.get((case, name, (self.envs, self.batch)))
        return BenchPair(
            case=case,
            size=f"{name}, E {self.envs}, batch {self.batch}, {self.optimizer}, {self.task.samples:,} samples",
            device=self.task.device,
            baseline=baseline,
            run=run,
            run_baseline=run_baseline,
            bar=bar,
            unit="samples/s",
            amount=self.envs * self.task.samples,
            turns=HORIZON,
        )


def train_task(args: BenchArgs, device: torch.device, size: Size) -> Iterator[BenchPair]:
    """Yields the rate of an epoch without growth against tuned PyTorch."""
    bench = TaskBench(args, device, size)
    with bench.tuned() as (name, epoch), bench.hosts() as env:
        yield bench.pair("train-task", partial(train, env), name, epoch, args.quick)


def grow_task(args: BenchArgs, device: torch.device, size: Size) -> Iterator[BenchPair]:
    """Yields the rate of a whole step in which hosts grow, against the hosts alone in tuned PyTorch.

    The step has training with seeds, all validations, gates and the controller's decisions.
    """
    bench = TaskBench(args, device, size)
    with bench.tuned() as (name, epoch), bench.hosts() as env:
        controller = controller_for(CONTROLLER, env.config, env, run_seed=0)
        step = partial(grow, Rollout(env, controller))
        yield bench.pair("grow-task", step, f"the hosts alone, {name}", epoch, args.quick)


def workers(args: BenchArgs, device: torch.device, size: Size) -> Iterator[BenchPair]:
    """Yields the rate of an epoch without growth by two workers against one. Raises ConfigError on a GPU."""
    if device.type != "cpu":
        raise ConfigError("workers are a CPU's; give --device cpu")
    bench = TaskBench(args, device, size)
    with bench.hosts(lanes=WORKERS) as several, bench.hosts(lanes=1) as one:
        yield bench.pair("workers", partial(train, several), "one worker", partial(train, one), args.quick)


def grow(rollout: Rollout) -> None:
    """Performs one step; when all episodes have ended, new ones begin."""
    with one_thread():
        if not rollout.begun or rollout.over:
            rollout.begin(0)
        rollout.step()


def short(task: Task, batch: int, quick: bool) -> Task:
    """Returns the task with a few full batches of its training samples, for hosts of equal work.

    Raises ConfigError for a task whose data is not in memory, or whose loss is not cross-entropy.
    """
    train = task.train
    if not isinstance(train, Split) or not isinstance(train.x, Tensor) or task.loss != "cross_entropy":
        raise ConfigError(
            f"train-task trains tasks with data in memory and the loss cross_entropy, and {task.name} is another"
        )
    samples = batch
    if not quick:
        samples = min(len(train), FULL) // batch * batch
    if samples == 0:
        raise ConfigError(f"train-task: {task.name} has {len(train)} training samples, fewer than a batch of {batch}")
    few = Split(train.x[:samples], train.y[:samples], train.table)
    return replace(task, train=few, samples_per_epoch=None)


# validate: every configuration of a host with blended seeds, against one forward pass of the host.

# One slot in each block; the first configurations diverge right after the first block.
BLENDED = ("r0c0", "r0c1", "r0c2")
# The tree costs at most four forward passes.
_TREE_BARS: dict[tuple[str, Size], float] = {("cpu", (VALIDATION, 8)): 0.25}


def validate(args: BenchArgs, device: torch.device, size: Size) -> Iterator[BenchPair]:
    """Yields the tree against one configuration, and against each configuration evaluated separately."""
    samples, width = size
    task = image_task(64, width, device, validation=samples)
    with growth_env(task, envs=1, batch=32) as env, one_thread():
        host = env.training[0]
        blend(host)
        everything = CounterfactualHelper().plan(host.sites, costly=True)
        evaluated = partial(evaluate, host, task.validation)
        against_one = BenchPair(
            case=f"validate: {len(everything)} configurations of 3 blended seeds",
            size=f"{samples:,} samples, width {width}, {', '.join(BLENDED)}",
            device=device,
            baseline="one forward, all on (bar: at most 4 times)",
            run=partial(evaluated, everything),
            run_baseline=partial(evaluated, everything[:1]),
            bar=_TREE_BARS.get((device.type, size)),
        )
        yield against_one
        each = partial(_each, evaluated, everything)
        yield replace(against_one, baseline="each configuration by itself", run_baseline=each, bar=None)


def blend(training: HostTraining) -> None:
    """Puts seeds in BLENDING into all ``BLENDED`` slots, halfway to full alpha."""
    for name in BLENDED:
        site = training.site_by_name[name]
        training.plant(site, BLUEPRINTS.get("cnn", "conv_light"), STYLES["LINEAR_ADD"])
        training.assign(site, Role.BLENDED, 0.5, 0.0, learning=True)


def _each(evaluated: Callable[[Sequence[object]], object], configurations: Sequence[object]) -> None:
    for configuration in configurations:
        evaluated([configuration])


CASES = {
    "grow-task": Case("ENVSxBATCH", ((8, 64),), grow_task),
    "train-epoch": Case(
        "ENVSxBATCHxWIDTH",
        ((4, 128, 8), (4, 32, 8), (4, 128, 32)),
        train_epoch,
        cuda=((8, 128, 8), (1, 128, 8), (8, 512, 32)),
    ),
    "train-task": Case("ENVSxBATCH", ((8, 128), (8, 64)), train_task),
    "validate": Case(
        "SAMPLESxWIDTH",
        ((VALIDATION, 8), (VALIDATION, 32)),
        validate,
        quick=((100, 8), (100, 32)),
    ),
    "workers": Case("ENVSxBATCH", ((8, 64),), workers),
}
