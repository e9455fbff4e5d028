"""Contexts of the exam: laws that they are drawn from, what is known of them, and plans played in them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from esper.agents.advisor import HostFacts
from esper.config import TrainingConfig
from esper.core.arrays import Floats
from esper.core.sizing import FACTORS
from esper.data.task import resolve
from esper.exam.context import BATCH, RATES, REGION, Context, Law, task_of
from esper.exam.sources import load_source
from esper.training.execution.tiers import make_executor, prepare_hosts
from esper.training.executor import Placed
from esper.training.host_trainer import HostTrainer, make_trainings
from esper.training.host_training import HostTraining
from esper.training.validate import all_off, evaluate

AT_ONCE = 64
"""Hosts that are held in memory at a time."""


def law_of_region(sources: Sequence[str]) -> Law:
    """Returns a law whose contexts all lie in the region that is left out, in each of its three respects."""
    return Law(
        tuple(sources),
        cnn_widths=REGION.widths,
        mlp_widths=REGION.widths,
        cnn_epochs=REGION.epochs,
        mlp_epochs=REGION.epochs,
        samples=REGION.samples,
        left_out=None,
    )


def wide_law(sources: Sequence[str]) -> Law:
    """Returns a law of wider hosts, more samples and longer trainings, to learn from beside :class:`Law`."""
    return Law(
        tuple(sources),
        cnn_widths=(1, 2, 3, 6, 8, 12, 16, 24),
        mlp_widths=(1, 2, 3, 6, 8, 12, 16, 24, 32, 64),
        cnn_epochs=(3, 40),
        mlp_epochs=(3, 60),
        samples=(40, 3_000),
    )


def factor_of(context: Context, plan: int) -> int:
    """Returns the multiple of a plan, or the largest one that is not too wide."""
    return context.factors[: plan + 1][-1]


def operations_of(context: Context) -> float:
    """Returns floating-point operations of a forward pass of a sample."""
    source = load_source(context.source)
    w = context.width
    if not source.images:
        inputs = int(source.x.shape[1])
        return 2.0 * (inputs * w + w**2 + w * source.classes)
    return 2.0 * (64 * 9 * w + 16 * 18 * w**2 + 2 * w * source.classes)


def facts_of(context: Context) -> HostFacts:
    """Returns what is known of a context before its first step."""
    source = load_source(context.source)
    width = context.width
    batch = min(BATCH, context.samples)
    return HostFacts(
        widths=(width, 2 * width) if source.images else (width, width),
        parameters={factor: context.parameters(factor) for factor in context.factors},
        operations=operations_of(context),
        inputs=source.x[0].size,
        classes=source.classes,
        convolutional=source.images,
        samples=context.samples,
        epochs=context.epochs,
        updates=context.samples // batch * context.epochs,
        rate=RATES[context.topology, context.optimizer] * context.rate,
    )


@dataclass(frozen=True)
class Job:
    """One host to train: a context at a multiple of its widths, for a share of its epochs."""

    context: Context
    factor: int
    seed: int
    epochs: int

    @property
    def work(self) -> float:
        return self.context.parameters(self.factor) * self.context.samples * self.epochs


def train_jobs(jobs: Sequence[Job]) -> Floats:
    """Returns the accuracy of each job's host after its training, pp [jobs, 2]: validation, test."""
    scores = np.zeros((len(jobs), 2))
    # Hosts that take long come first, so that those trained side by side end together.
    order = sorted(range(len(jobs)), key=lambda number: -jobs[number].work)
    run = TrainingConfig().run
    with closing(make_executor(run, torch.device("cpu"))) as executor:
        for start in range(0, len(jobs), AT_ONCE):
            numbers = order[start : start + AT_ONCE]
            hosts = _hosts([jobs[number] for number in numbers])
            prepare_hosts(run, hosts, executor)
            with closing(HostTrainer(hosts[0].task, hosts, executor)) as trainer:
                _train(trainer)
                scores[numbers] = _judge(trainer)
    return scores


def _train(trainer: HostTrainer) -> None:
    left = list(trainer.hosts)
    while left:
        trainer.epoch(left)
        left = [host for host in left if host.epoch < host.horizon]


def _judge(trainer: HostTrainer) -> Floats:
    """Returns validation and test accuracy of the hosts, pp [hosts, 2]."""
    scores: dict[object, list[float]] = {}

    def judge(host: Placed) -> None:
        assert isinstance(host, HostTraining)
        splits = (host.task.validation, host.task.test)
        scores[host] = []
        for split in splits:
            result = evaluate(host, split, [all_off(host)])
            scores[host].append(float(result.accuracy[0]))

    trainer.run(judge, trainer.hosts)
    return np.array([scores[host] for host in trainer.hosts])


def _hosts(jobs: Sequence[Job]) -> list[HostTraining]:
    tasks = [task_of(job.context, job.factor) for job in jobs]
    configs = []
    for job, task in zip(jobs, tasks, strict=True):
        config = TrainingConfig().with_values(
            env={"episode_length": job.epochs, "n_envs": 1}
        )
        configs.append(resolve(config, task))
    # A host's random numbers depend on its index, and are to be the same in any company.
    hosts = make_trainings(tasks, configs, [0] * len(jobs))
    for job, host in zip(jobs, hosts, strict=True):
        host.reset(job.context.key, job.seed)
    return hosts


def play(
    contexts: Sequence[Context],
    seeds: Sequence[int],
    share: float = 1.0,
) -> Floats:
    """Returns validation and test accuracy of every plan in every context, pp [contexts, plans, seeds, 2].

    ``share`` is the part of the epochs that hosts train for. Plans that lead to one width share its host.
    """
    jobs: dict[tuple[int, int, int], Job] = {}
    for number, context in enumerate(contexts):
        epochs = max(1, round(share * context.epochs))
        for plan in range(len(FACTORS)):
            for seed in seeds:
                factor = factor_of(context, plan)
                jobs[number, factor, seed] = Job(
                    context,
                    factor,
                    seed,
                    epochs,
                )
    scores = dict(zip(jobs, train_jobs(list(jobs.values())), strict=True))
    result = np.zeros((len(contexts), len(FACTORS), len(seeds), 2))
    for number, context in enumerate(contexts):
        for plan in range(len(FACTORS)):
            for place, seed in enumerate(seeds):
                result[number, plan, place] = scores[
                    number, factor_of(context, plan), seed
                ]
    return result
