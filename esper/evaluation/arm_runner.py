"""Playing one arm of a comparison: how it treats a round of hosts, and the result of each host."""

from __future__ import annotations

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
from esper.hosts.grown import KeptSeed
from esper.rollout.rollout import EpisodeStats, play_round
from esper.seeds.blend import STYLES
from esper.telemetry.event import ArmPlayed

MakePlayer = Callable[[SlotVectorEnv], Controller]

HELD_OUT = 2**31
"""Offset added to a run's seed for held-out hosts, which no agent learned on."""

NAN = float("nan")


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
    """Floating-point operations of training and validation, see ``compute``; NaN if hosts are simulated."""
    epochs: float
    rollbacks: float
    fossils: float
    kept: Mapping[str, KeptSeed] = field(default_factory=dict)
    """The seed kept in each slot; empty if hosts are simulated or nothing was grown."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further information, ready for JSON."""

    def plain(self) -> dict[str, Any]:
        """Returns the fields, ready for JSON."""
        return asdict(self)

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> HostResult:
        """Restores the result of :meth:`plain`; non-finite numbers may be given by name."""
        kept = {slot: KeptSeed(**seed) for slot, seed in plain["kept"].items()}
        numbers = {name: float(value) for name, value in plain.items() if name not in ("kept", "facts")}
        return cls(**numbers, kept=kept, facts=plain["facts"])


class Side(ABC):
    """Plays the rounds of one arm. A round's result depends only on its number and on the results of the arm ``of``."""

    of: str | None = None
    """The arm that must play a round before this one does; None for no arm."""

    def prepare(self) -> None:  # noqa: B027  most have nothing to prepare
        """Does slow work before the first round; none by default."""

    @abstractmethod
    def play(self, number: int, of: Sequence[HostResult]) -> list[HostResult]:
        """Plays round ``number``, counted from 0. ``of``: results of the arm ``self.of`` in that round, if any."""

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Releases threads and memory."""


class GrowingSide(Side):
    """An arm in which a controller or a trained agent grows hosts, or leaves them alone.

    Args:
        n_envs: number of hosts per round.
        run_seed: seed that the hosts are derived from; the baseline is that of the config's own seed.
        baselines: measured baselines by :func:`baseline_key`, shared by all sides; this side adds its own.
        count: whether its floating-point operations are counted.
    """

    def __init__(
        self,
        maker: EnvMaker,
        make_player: MakePlayer,
        n_envs: int,
        run_seed: int,
        baselines: dict[Any, Baseline],
        count: bool = True,
    ) -> None:
        self.run_seed, self.baselines = run_seed, baselines
        self.env = maker.make(n_envs=n_envs)
        try:
            self.player = make_player(self.env)
        except BaseException:
            self.env.close()
            raise
        self.meter: ComputeMeter | None = None
        if count and isinstance(self.env, GrowthVectorEnv):
            self.meter = ComputeMeter(self.env.task, self.env.config, self.env.blueprints)
            self.env.watch = self.meter.watch

    def prepare(self) -> None:
        env = self.env
        trained_alike = baseline_key(env)
        env.baseline = env.baseline or self.baselines.get(trained_alike)
        env.prepare()
        if env.baseline is not None:
            self.baselines[trained_alike] = env.baseline
        env.run_seed = self.run_seed

    def play(self, number: int, of: Sequence[HostResult] = ()) -> list[HostResult]:
        self.env.episode_numbers[:] = number - 1
        self.player.episode[:] = number - 1
        played = play_round(self.env, self.player)
        accuracy = self.env.test_accuracy()
        return [self._result(env, played, float(accuracy[env])) for env in range(self.env.num_envs)]

    def _result(self, env: int, played: EpisodeStats, accuracy: float) -> HostResult:
        return HostResult(
            accuracy=accuracy,
            loss=float(self.env.fleet.committed_loss[env]),
            parameters=float(played.parameters[env]),
            host_parameters=float(self.env.host_parameters),
            flops=NAN if self.meter is None else self.meter.flops(env),
            epochs=float(played.epochs[env]),
            rollbacks=float(played.rollbacks[env]),
            fossils=float(played.fossils[env]),
            kept=self._kept(env),
            facts={"validation_accuracy": float(played.committed[env]), "return": float(played.returns[env])},
        )

    def _kept(self, env: int) -> dict[str, KeptSeed]:
        if not isinstance(self.env, GrowthVectorEnv):
            return {}
        names = {style: name for name, style in STYLES.items()}
        return {
            slot.name: KeptSeed(slot.blueprint.name, names[slot.style], slot.alpha.alpha)
            for slot in self.env.training[env].fossils()
            if slot.blueprint is not None and slot.style is not None
        }

    def close(self) -> None:
        self.env.close()


def baseline_key(env: SlotVectorEnv) -> tuple[Any, ...]:
    """Returns a key that is equal for envs whose hosts, left alone, are the same."""
    config = env.config
    return (type(env), config.task, config.env.episode_length, config.env.baseline_episodes, config.run.device)


def play_rounds(
    sides: Mapping[str, Side],
    rounds: int,
    order: np.random.Generator,
    played: Mapping[str, dict[int, list[HostResult]]],
    keep: Callable[[str, int, list[HostResult]], None],
    progress: Callable[[ArmPlayed], None],
) -> None:
    """Plays every round of every arm that is missing in ``played`` (by arm and number), and stores its results there.

    The arms of a round are played in random order, so that a change in the machine's speed affects all of them; an arm
    that depends on another waits for it. Each result is passed to ``keep`` at once.
    """
    for number in range(rounds):
        waiting = list(sides)
        while waiting:
            ready = [name for name in waiting if sides[name].of not in waiting]
            name = ready[order.integers(len(ready))]
            waiting.remove(name)
            if number in played[name]:
                continue
            leader = sides[name].of
            hosts = sides[name].play(number, played[leader][number] if leader is not None else ())
            played[name][number] = hosts
            keep(name, number, hosts)
            accuracy = float(np.mean([host.accuracy for host in hosts]))
            progress(ArmPlayed(name, number + 1, rounds, accuracy))
