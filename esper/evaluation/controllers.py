"""Controllers compared under one config: at the end of a run, by `esper eval`, and by ``esper.compare_controllers``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from esper.config import ConfigError, TrainingConfig
from esper.data.task import Task
from esper.env.baseline import Baseline
from esper.env.make import EnvMaker
from esper.evaluation.analysis import ArmComparison, corrected
from esper.evaluation.runner import (
    HELD_OUT,
    GrowingRunner,
    HostResult,
    MakePlayer,
    Progress,
    Results,
    in_order,
    play_rounds,
    split_pairs,
)
from esper.evaluation.statistics import Floats, compare_pairs
from esper.files.system_info import check_devices
from esper.rollout.policies import make_player
from esper.rollout.threads import one_thread


@dataclass(frozen=True)
class ArmResult:
    """Results of one arm, one value per host in the order of the pairs; test accuracies of committed networks in pp."""

    controller: str
    accuracy: Floats
    parameters: Floats
    fossils: Floats

    @classmethod
    def of(cls, controller: str, hosts: Sequence[HostResult]) -> ArmResult:
        columns = zip(*((host.accuracy, host.parameters, host.fossils) for host in hosts), strict=True)
        return cls(controller, *(np.array(column) for column in columns))


def compare_controllers(
    config: TrainingConfig,
    controllers: Sequence[str],
    pairs: int = 10,
    progress: Progress | None = None,
    task: Task | None = None,
) -> list[ArmResult]:
    """Plays ``controllers``, given by name, on ``pairs`` hosts with the same initial weights and the same batches.

    The hosts are the held-out hosts of ``run.seed``, the same ones that an agent's run with that seed ends with.

    Args:
        config: config of all arms.
        progress: called after each arm's round.
        task: what hosts are trained on; None: the task named in ``config``.

    Raises:
        ConfigError: a controller is unknown or repeated, or the config cannot run.
    """
    if len(set(controllers)) < len(controllers):
        raise ConfigError(f"a controller is given twice: {', '.join(controllers)}")
    check_devices(config.run.device)
    maker = EnvMaker.of(config, task)
    seed = config.run.seed + HELD_OUT

    def player(name: str) -> MakePlayer:
        return lambda env: make_player(name, maker.config, env, seed)

    return play_arms(maker, {name: player(name) for name in controllers}, pairs, seed, progress)


@one_thread()
def play_arms(
    maker: EnvMaker,
    players: Mapping[str, MakePlayer],
    pairs: int,
    run_seed: int,
    progress: Progress | None = None,
    baseline: Baseline | None = None,
    results: Results | None = None,
) -> list[ArmResult]:
    """Lets every player grow the hosts of ``run_seed``: pair i is the same (env, episode) for each of them.

    Args:
        baseline: the no-growth baseline; None: that of the config's run seed, measured once.
        results: results by player and round. Rounds found here are not played again; each new one is stored here before
            ``progress`` is called.
    """
    if results is None:
        results = {name: {} for name in players}
    rounds, n_envs = split_pairs(pairs, maker.config.env.n_envs or 1)
    runners: dict[str, GrowingRunner] = {}
    baselines: dict[Any, Baseline] = {}
    with ExitStack() as opened:
        for name, make in players.items():
            runner = GrowingRunner(maker, make, n_envs, run_seed, baselines, count_flops=False)
            runners[name] = opened.enter_context(closing(runner))
        for runner in runners.values():
            runner.env.baseline = runner.env.baseline or baseline
            runner.prepare()
        play_rounds(runners, rounds, np.random.default_rng([run_seed, len(players)]), results, progress)
    return [ArmResult.of(name, hosts) for name, hosts in in_order(results, rounds, pairs).items()]


def against_reference(arms: Sequence[ArmResult], reference: str) -> list[ArmComparison]:
    """Compares every other arm with the reference arm (other minus reference)."""
    base = next(arm for arm in arms if arm.controller == reference)
    return _compare([(arm, base) for arm in arms if arm is not base])


def against_each(arms: Sequence[ArmResult], ours: str) -> list[ArmComparison]:
    """Compares one arm with each of the others (``ours`` minus other)."""
    own = next(arm for arm in arms if arm.controller == ours)
    return _compare([(own, arm) for arm in arms if arm is not own])


def _compare(pairs: Sequence[tuple[ArmResult, ArmResult]]) -> list[ArmComparison]:
    return corrected(
        [compare_pairs(a.accuracy, b.accuracy, name_a=a.controller, name_b=b.controller) for a, b in pairs]
    )
