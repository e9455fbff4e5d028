"""Playing arms on the same hosts, round by round: what an arm does with a round of hosts, and each host's result."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from esper.control.controller import Controller
from esper.env.baseline import Baseline
from esper.env.make import EnvMaker
from esper.env.slot_env import SlotVectorEnv
from esper.env.vector_env import GrowthVectorEnv
from esper.evaluation.compute import ComputeMeter
from esper.files.grown_host import kept_seed
from esper.hosts.grown import KeptSeed
from esper.rollout.rollout import play_round
from esper.telemetry.event import ArmPlayed, ScoreDefined
from esper.telemetry.score import ACCURACY, ScoreUnit

MakeController = Callable[[SlotVectorEnv], Controller]
Progress = Callable[[ArmPlayed | ScoreDefined], None]
"""Receives each arm's rounds, and before them the score unless it is accuracy."""
"""Called after each arm's round."""


def name_score(score: ScoreUnit, progress: Progress | None) -> None:
    """Tells ``progress`` what hosts are scored by, unless it is accuracy."""
    if progress is not None and score != ACCURACY:
        progress(ScoreDefined(score.name, score.unit, score.points))


HELD_OUT = 2**31
"""Added to a run's seed for its held-out hosts, which no agent learns from."""


@dataclass(frozen=True)
class HostResult:
    """Result of one host; NaN if a value does not exist."""

    accuracy: float
    """Accuracy of the committed network on the test split, pp."""
    loss: float
    """Loss of the committed network on the validation split after the last epoch."""
    parameters: float
    """Number of parameters of the committed network."""
    host_parameters: float
    """Number of parameters of the task's host."""
    flops: float
    """Floating-point operations of training and validation, see ``compute``; NaN if they were not counted."""
    epochs: float
    rollbacks: float
    fossils: float
    kept: Mapping[str, KeptSeed] = field(default_factory=dict)
    """The seed kept in each slot; empty if hosts are simulated or nothing was grown."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further information, ready for JSON."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> HostResult:
        """Restores the result of :meth:`plain`; non-finite numbers may be given by name."""
        kept = {slot: KeptSeed(**seed) for slot, seed in plain["kept"].items()}
        numbers = {name: float(value) for name, value in plain.items() if name not in ("kept", "facts")}
        return cls(**numbers, kept=kept, facts=plain["facts"])


Results = dict[str, dict[int, list[HostResult]]]
"""Results of the hosts by arm and round."""


class ArmRunner(ABC):
    """Plays the rounds of one arm.

    The result of a round depends only on its number and, for a control, on the grown hosts.
    """

    control_of: str | None = None
    """The arm that must play a round before this one does, because this one is a control of its hosts."""

    def prepare(self) -> None:  # noqa: B027  most have nothing to prepare
        """Does slow work before the first round; none by default."""

    @abstractmethod
    def play(self, number: int, grown: Sequence[HostResult]) -> list[HostResult]:
        """Plays round ``number``, counted from 0. ``grown``: results of ``control_of`` in that round, if any."""

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Releases threads and memory."""


class GrowingRunner(ArmRunner):
    """Runs an arm in which a controller or a trained agent grows hosts, or leaves them alone.

    Args:
        n_envs: number of hosts per round.
        run_seed: seed that the hosts are derived from; the baseline is that of the config's own seed.
        baselines: measured baselines by what they depend on, shared by all arms; this one adds its own.
        count_flops: whether floating-point operations are counted; those of simulated hosts never are.
    """

    def __init__(
        self,
        maker: EnvMaker,
        make_controller: MakeController,
        n_envs: int,
        run_seed: int,
        baselines: dict[Any, Baseline],
        count_flops: bool = True,
    ) -> None:
        self.run_seed, self.baselines = run_seed, baselines
        self.env = maker.make(n_envs=n_envs)
        try:
            self.controller = make_controller(self.env)
        except BaseException:
            self.env.close()
            raise
        self.meter: ComputeMeter | None = None
        if count_flops and isinstance(self.env, GrowthVectorEnv):
            self.meter = ComputeMeter(self.env.task, self.env.config, self.env.blueprints)
            self.env.hosts.watch = self.meter.watch

    def prepare(self) -> None:
        env, config = self.env, self.env.config
        # Equal for envs whose hosts, left alone, are the same.
        key = (type(env), config.task, config.env.episode_length, config.env.baseline_episodes, config.run.device)
        env.baseline = env.baseline or self.baselines.get(key)
        env.prepare()
        if env.baseline is not None:
            self.baselines[key] = env.baseline
        env.run_seed = self.run_seed

    def play(self, number: int, grown: Sequence[HostResult] = ()) -> list[HostResult]:
        env = self.env
        env.state.episode[:] = self.controller.episode[:] = number - 1
        played, accuracy = play_round(env, self.controller), env.test_accuracy()
        trained = env.training if isinstance(env, GrowthVectorEnv) else None
        return [
            HostResult(
                accuracy=float(accuracy[i]),
                loss=float(env.state.committed_loss[i]),
                parameters=float(played.parameters[i]),
                host_parameters=float(env.host_parameters),
                flops=math.nan if self.meter is None else self.meter.flops(i),
                epochs=float(played.epochs[i]),
                rollbacks=float(played.rollbacks[i]),
                fossils=float(played.fossils[i]),
                kept={site.name: kept_seed(site) for site in trained[i].fossils()} if trained else {},
                facts={"validation_accuracy": float(played.committed[i]), "return": float(played.returns[i])},
            )
            for i in range(env.num_envs)
        ]

    def close(self) -> None:
        self.env.close()


def split_pairs(pairs: int, n_envs: int) -> tuple[int, int]:
    """Returns (number of rounds, hosts per round): as few rounds as ``n_envs`` allows, then as few surplus hosts."""
    rounds = -(-pairs // n_envs)
    return rounds, -(-pairs // rounds)


def in_order(results: Results, pairs: int) -> dict[str, list[HostResult]]:
    """Returns the hosts of the rounds that every arm has finished, in the order of their pairs, at most ``pairs``."""
    complete = sorted(set.intersection(*(set(done) for done in results.values())))
    return {name: [host for number in complete for host in done[number]][:pairs] for name, done in results.items()}


def play_rounds(
    runners: Mapping[str, ArmRunner],
    rounds: int,
    order: np.random.Generator,
    results: Results,
    progress: Progress | None = None,
    save: Callable[[str, int, list[HostResult]], None] | None = None,
) -> None:
    """Plays every round of every arm that is missing in ``results``, and stores it there.

    The arms of a round are played in random order, so that a change in the machine's speed affects all of them; a
    control waits for its arm. Each result is passed to ``save`` before progress is reported.
    """
    for number in range(rounds):
        waiting = list(runners)
        while waiting:
            ready = [name for name in waiting if runners[name].control_of not in waiting]
            name = ready[order.integers(len(ready))]
            waiting.remove(name)
            if number in results[name]:
                continue
            control_of = runners[name].control_of
            grown = () if control_of is None else results[control_of][number]
            hosts = results[name][number] = runners[name].play(number, grown)
            if save is not None:
                save(name, number, hosts)
            if progress is not None:
                progress(ArmPlayed(name, number + 1, rounds, float(np.mean([host.accuracy for host in hosts]))))
