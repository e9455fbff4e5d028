"""Cases of hosts in training, against the same hosts in PyTorch; of their validation and env steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from esper.agents.make import controller_for
from esper.agents.ppo.agent import PPOAgent
from esper.bench.baselines import LR, Epoch, Workload, in_processes, plain, plain_cnn, shares, tuned
from esper.bench.case import BenchArgs, BenchPair, Case, Size
from esper.bench.fixtures import BLOCKS, CHANNELS, CLASSES, SIDE, VALIDATION, full_telemetry, growth_env, image_task
from esper.config import ConfigError, Optimizer
from esper.core.blueprints import BLUEPRINTS
from esper.core.ramps import STYLES
from esper.core.site import Role
from esper.data.split import Split
from esper.data.task import Task
from esper.data.tasks import load_task
from esper.env.vector_env import GrowthVectorEnv
from esper.hosts.host import Host
from esper.run.rollout import Rollout, one_thread
from esper.training.counterfactual import CounterfactualHelper
from esper.training.execution.cores import usable_cores
from esper.training.host_training import HostTraining
from esper.training.precision import concrete
from esper.training.validate import evaluate

# train-epoch: images per second of an epoch of many hosts.

# Min ratios to the tuned baseline. On CUDA it replays a graph of each host side by side, as Esper does, so the bar is
# "not slower".
BARS: dict[tuple[str, Size], float] = {
    ("cpu", (4, 128, 8)): 2.5,
    ("cpu", (4, 32, 8)): 2.0,
    ("cpu", (4, 128, 32)): 2.0,
    ("cuda", (8, 128, 8)): 1.0,
    ("cuda", (8, 512, 32)): 1.0,
}
SWEEP = tuple((envs, batch, width) for width in (8, 32) for batch in (32, 128, 512) for envs in (1, 2, 4, 8))
FULL = 5120
"""Samples per epoch and env, in rows with a bar and on CUDA; of train-task, at most."""


def samples_of(size: Size, device: torch.device, quick: bool) -> int:
    """Returns the samples per epoch and env: full batches, few enough that a row on a CPU takes about ten seconds."""
    envs, batch, width = size
    if quick:
        return batch
    wanted = FULL
    if device.type == "cpu" and (device.type, size) not in BARS:
        wanted = min(FULL, 40_000 // (envs * width))
    return max(2, wanted // batch) * batch


def train_epoch(args: BenchArgs, device: torch.device, size: Size) -> Iterator[BenchPair]:
    """Yields the rate against tuned and plain PyTorch; then in a process per core, as in `esper run`."""
    envs, batch, width = size
    samples = samples_of(size, device, args.quick)
    data = image_task(samples, width, device).train
    work = workload(data, partial(plain_cnn, CHANNELS, CLASSES, width, BLOCKS), envs, batch)
    bar = None
    if not args.quick:
        bar = BARS.get((device.type, size))
    plain_name, plain_epoch = plain(work)
    ours = partial(esper_epoch, samples=samples, batch=batch, width=width, device=device)
    with tuned(work, compiles=not args.quick) as (tuned_name, tuned_epoch), ours(envs) as epoch:
        against_tuned = BenchPair(
            case="train-epoch",
            size=f"E {envs}, batch {batch}, width {width}, {samples:,} samples of {SIDE} x {SIDE}",
            device=device,
            baseline=tuned_name,
            run=epoch,
            run_baseline=tuned_epoch,
            bar=bar,
            unit="images/s",
            amount=envs * samples,
        )
        yield against_tuned
        yield replace(against_tuned, baseline=plain_name, run_baseline=plain_epoch, bar=None)
        parts = shares(envs, usable_cores())
        if device.type == "cpu" and len(parts) > 1:
            with in_processes([partial(ours, count, lanes=1) for count in parts]) as spread:
                yield replace(against_tuned, case=f"train-epoch: in {len(parts)} processes", run=spread)


def workload(data: Any, build: Callable[[], Any], hosts: int, batch: int) -> Workload:
    """Returns the work of the baselines: the same data, as networks see it."""
    assert isinstance(data, Split)
    return Workload(build, hosts, data.inputs(0, len(data)).contiguous(), data.y, batch)


@contextmanager
def esper_epoch(
    hosts: int,
    samples: int,
    batch: int,
    width: int,
    device: torch.device,
    lanes: int | None = None,
) -> Iterator[Epoch]:
    """Yields an epoch of an env; ``lanes`` hosts train at the same time, by default as many as there are cores."""
    task = image_task(samples, width, device, validation=batch)
    with growth_env(task, hosts, batch, lanes=lanes) as env:
        yield partial(train, env)


def train(env: GrowthVectorEnv) -> None:
    """Trains every host for an epoch."""
    with one_thread():
        env.local.trainer.epoch(env.training)


# train-task: samples per second of the hosts of any task, as the task trains them.

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


def train_task(args: BenchArgs, device: torch.device, size: Size) -> Iterator[BenchPair]:
    """Yields the rates of an epoch without growth, and of a whole step in which hosts grow.

    The step has training with seeds, all validations, gates and the controller's decisions; the baseline is the hosts
    alone. Raises ConfigError for a task that the baseline cannot train.
    """
    envs, batch = size
    task = short(load_task(args.task).to(device), batch, args.quick)
    samples = task.samples
    optimizer: Optimizer = args.optimizer or task.optimizer
    settings: dict[str, Any] = {
        "optimizer": optimizer,
        "precision": args.precision or task.precision,
        "horizon": HORIZON,
    }
    if optimizer != task.optimizer:
        settings["learning_rate"] = RATES[optimizer]
    work = replace(workload(task.train, HostOf(args.task), envs, batch), optimizer=optimizer)
    if args.precision is not None:
        work = replace(work, precisions=(getattr(torch, concrete(args.precision, device)),))
    with (
        tuned(work, compiles=not args.quick) as (name, tuned_epoch),
        growth_env(task, envs, batch, **settings) as alone,
        growth_env(task, envs, batch, **settings) as growing,
    ):
        controller = controller_for(CONTROLLER, growing.config, growing, run_seed=0)
        without_growth = BenchPair(
            case="train-task",
            size=f"{args.task}, E {envs}, batch {batch}, {optimizer}, {samples:,} samples",
            device=device,
            baseline=name,
            run=partial(train, alone),
            run_baseline=tuned_epoch,
            unit="samples/s",
            amount=envs * samples,
            turns=HORIZON,
        )
        yield without_growth
        step = partial(grow, Rollout(growing, controller))
        yield replace(without_growth, case=f"train-task: a step of growth by {CONTROLLER}", run=step)


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


# env-step: the share of an epoch that is neither training nor validation of hosts.

BUDGET = 5.0
"""Max share of an epoch, in %."""
HOSTS = ("stage", "train", "validate")
"""Phases that are work of the hosts."""


class Steps:
    """Steps of envs under an untrained agent, as in a run."""

    def __init__(self, env: GrowthVectorEnv) -> None:
        self.env = env
        self.agent = PPOAgent(env.action_spec, env.layout, env.num_envs, env.config.ppo)
        self.rollout = Rollout(env, self.agent, learner=self.agent)
        self.telemetry: list[float] = []
        """Share of telemetry in each step, in %."""

    def step(self) -> float:
        """Performs one step of all envs and returns the share of its time, in %, that was not the hosts'.

        When all episodes have ended, new ones begin.
        """
        if not self.rollout.begun or self.rollout.over:
            self.agent.buffer.clear()
            self.rollout.begin(seed=0)
        began = self.rollout.seconds
        before = self.env.phase_seconds
        self.rollout.step()
        share = 100 / (self.rollout.seconds - began)
        rest = 100.0
        for phase, total in self.env.phase_seconds.items():  # they add up over a run
            spent = share * (total - before.get(phase, 0.0))
            if phase in HOSTS:
                rest -= spent
            elif phase == "telemetry":
                self.telemetry.append(spent)
        return rest


def env_step(args: BenchArgs, device: torch.device, size: Size) -> Iterator[BenchPair]:
    """Yields the whole share, then that of telemetry in the same steps."""
    envs, batch, width = size
    samples = max(1, FULL // batch) * batch
    task = image_task(samples, width, device)
    bar: float | None = 1.0
    if args.quick:
        task = image_task(batch, width, device, validation=batch)
        bar = None
    with full_telemetry() as hub, growth_env(task, envs, batch, hub.emit) as env, one_thread():
        steps = Steps(env)
        steps.step()  # warm-up
        whole = BenchPair(
            case="env-step: all but training and validation of hosts",
            size=f"E {envs}, batch {batch}, width {width}, {task.samples:,} samples",
            device=device,
            baseline=f"a budget of {BUDGET:g} %",
            run=steps.step,
            run_baseline=lambda: BUDGET,
            bar=bar,
            unit="%",
        )
        yield whole
        shares = steps.telemetry
        yield replace(whole, case="env-step: telemetry only", run=shares.pop, bar=None, turns=len(shares))


CASES = {
    "env-step": Case("ENVSxBATCHxWIDTH", ((4, 128, 8),), env_step),
    "train-epoch": Case(
        "ENVSxBATCHxWIDTH",
        ((4, 128, 8), (1, 128, 8), (4, 32, 8), (4, 128, 32)),
        train_epoch,
        cuda=((8, 128, 8), (1, 128, 8), (8, 512, 32)),
        sweep=SWEEP,
    ),
    "train-task": Case("ENVSxBATCH", ((4, 128),), train_task),
    "validate": Case(
        "SAMPLESxWIDTH",
        ((VALIDATION, 8), (VALIDATION, 32)),
        validate,
        quick=((100, 8), (100, 32)),
    ),
}
