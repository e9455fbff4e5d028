"""Plays plans: trains the host of each context at each width, natively, many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from esper.config import TrainingConfig
from esper.core.arrays import Floats
from esper.core.sizing import FACTORS
from esper.data.task import resolve
from esper.exam.context import Context, task_of
from esper.training.execution.tiers import make_executor, prepare_hosts
from esper.training.executor import Placed
from esper.training.host_trainer import HostTrainer, make_trainings
from esper.training.host_training import HostTraining
from esper.training.validate import all_off, evaluate

AT_ONCE = 64
"""Hosts that are held in memory at a time."""


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
        config = TrainingConfig().with_values(env={"episode_length": job.epochs, "n_envs": 1})
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
                factor = context.factor(plan)
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
                result[number, plan, place] = scores[number, context.factor(plan), seed]
    return result
