"""Controllers compared on the same hosts: paired seeds, arms interleaved in random order, the test split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from esper.config import ConfigError, TrainingConfig
from esper.control.names import make_controller
from esper.data.task import resolve
from esper.data.tasks import load_task
from esper.env.vector_env import GrowthVectorEnv
from esper.experiment.environment import check_device
from esper.experiment.play import Played, play_round
from esper.experiment.statistics import PairedComparison, compare_pairs, holm_adjusted


@dataclass(frozen=True)
class Arm:
    """One arm's hosts in order of their pairs; accuracies pp, test split, committed networks."""

    controller: str
    accuracy: NDArray[np.float64]
    parameters: NDArray[np.float64]
    fossils: NDArray[np.float64]


@dataclass(frozen=True)
class ArmComparison:
    """An arm against the reference, with its p value corrected for all comparisons made together (Holm)."""

    pair: PairedComparison
    adjusted_p: float

    @property
    def verdict(self) -> str:
        return self.pair.verdict(p_value=self.adjusted_p)


def compare_controllers(
    config: TrainingConfig, controllers: Sequence[str], pairs: int, progress: Callable[[str], None]
) -> list[Arm]:
    """Play every controller on ``pairs`` hosts that start from the same weights and see the same batches.

    Arms share the run seed, so pair i is the same (env, episode) in each; the no-growth baseline is measured once. The
    arms of a round are played in random order, so that a change of the machine meets all of them.

    Raises:
        ConfigError: unknown or repeated controllers, or a config that cannot run.
    """
    if len(set(controllers)) < len(controllers):
        raise ConfigError(f"an arm is named twice: {', '.join(controllers)}")
    task = load_task(config.task.name).to(check_device(config.run.device))
    config = resolve(config, task)
    # As few envs as play the pairs in as many rounds, so that little is played beyond them.
    rounds = -(-pairs // (config.env.n_envs or 1))
    config = config.with_values(env={"n_envs": -(-pairs // rounds)})
    envs = {name: GrowthVectorEnv(task, config) for name in controllers}
    try:
        played: dict[str, list[Played]] = {name: [] for name in controllers}
        brains = {
            name: make_controller(name, task.name, env.action_spec, env.layout, env.num_envs, config.run.seed)
            for name, env in envs.items()
        }
        order = np.random.default_rng([config.run.seed, len(controllers)])
        baseline = None
        for number in range(rounds):
            for name in order.permutation(list(controllers)).tolist():
                envs[name].baseline = baseline or envs[name].baseline
                seed = config.run.seed if number == 0 else None
                played[name].append(play_round(envs[name], brains[name], seed))
                baseline = envs[name].baseline
                progress(f"round {number + 1}/{rounds}: {name} {played[name][-1].test.mean():.1f} %")
    finally:
        for env in envs.values():
            env.close()
    return [
        Arm(
            name,
            np.concatenate([p.test for p in rows])[:pairs],
            np.concatenate([p.parameters for p in rows])[:pairs],
            np.concatenate([p.fossils for p in rows])[:pairs],
        )
        for name, rows in played.items()
    ]


def against_reference(arms: Sequence[Arm], reference: str) -> list[ArmComparison]:
    """Every other arm minus the reference arm."""
    base = next(arm for arm in arms if arm.controller == reference)
    found = [
        compare_pairs(arm.accuracy, base.accuracy, name_a=arm.controller, name_b=reference)
        for arm in arms
        if arm is not base
    ]
    adjusted = holm_adjusted([pair.p_value for pair in found])
    return [ArmComparison(pair, p) for pair, p in zip(found, adjusted, strict=True)]
