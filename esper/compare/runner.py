"""Playing arms on the same hosts, round by round: what an arm does with a round of hosts, and each host's result."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from esper.agents.make import OwnController, controller_for
from esper.agents.spec import ControllerSpec
from esper.compare.compute import ComputeMeter, episodes, watch
from esper.config import TrainingConfig
from esper.core.action import STYLES
from esper.core.state import Baseline
from esper.data.task import Task
from esper.env.make import EnvMaker
from esper.env.slot_env import SlotVectorEnv
from esper.env.training_backend import TrainingBackend
from esper.env.vector_env import GrowthVectorEnv
from esper.files.system_info import check_devices
from esper.hosts.grown import KeptSeed
from esper.hosts.widen import shapes_of
from esper.run.interrupt import interrupts_wait
from esper.run.rollout import one_thread, play_round
from esper.telemetry.event import ArmPlayed, ScoreDefined
from esper.telemetry.score import ACCURACY, ScoreUnit
from esper.training.execution.ranks import RunRanks

Progress = Callable[[ArmPlayed | ScoreDefined], None]
"""Receives each arm's rounds, and before them the score unless it is accuracy."""


def maker_of(config: TrainingConfig, task: Task | None = None, ranks: RunRanks | None = None) -> EnvMaker:
    """Returns the maker of envs of a run or comparison; arguments and errors as of ``EnvMaker.of``.

    Raises ConfigError for a device that this machine lacks, too. Messages to ``ranks`` are never interrupted.
    """
    check_devices(config.run.device)
    if ranks is not None:
        ranks.whole = interrupts_wait
    return EnvMaker.of(config, task, ranks)


def name_score(score: ScoreUnit, progress: Progress | None) -> None:
    """Tells ``progress`` what hosts are scored by, unless it is accuracy."""
    if progress is not None and score != ACCURACY:
        progress(ScoreDefined(score.name, score.unit, score.points, score.priced, score.of_reward))


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
    """The seed kept in each slot, beside the host's layers; empty if hosts are simulated or nothing was grown."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the host's tensors, by name, if seeds were merged into its layers."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further information, ready for JSON."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> HostResult:
        """Restores the result of :meth:`plain`; non-finite numbers may be given by name."""
        return _HOST.validate_python(plain)


_HOST = TypeAdapter(HostResult)

Results = dict[str, dict[int, list[HostResult]]]
"""Results of the hosts by arm and round."""


Save = Callable[[str, int, list[HostResult], float], None]
"""Receives an arm, the number of a round, its hosts, and the seconds that the round took."""


class ArmRunner(ABC):
    """Plays the rounds of one arm.

    The result of a round depends only on its number and, for a control, on the grown hosts.
    """

    control_of: str | None = None
    """The arm that must play a round before this one does, because this one is a control of its hosts."""

    ranks: RunRanks | None = None
    """The ranks that its hosts are spread over, if any."""

    alone = False
    """Whether it leaves hosts alone."""

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
        env: the env to play in, which its owner closes; arms may take turns in one. None: one of its own, with
            ``n_envs`` hosts.
    """

    def __init__(
        self,
        maker: EnvMaker,
        controller: str | OwnController,
        n_envs: int,
        run_seed: int,
        baselines: dict[Any, Baseline],
        count_flops: bool = True,
        env: SlotVectorEnv | None = None,
    ) -> None:
        self.alone = ControllerSpec.of(controller).alone
        self.run_seed = run_seed
        self.baselines = baselines
        self.ranks = maker.ranks
        self._owns_env = env is None
        self.env = env or maker.make(n_envs=n_envs)
        self.env.configure(grouped=False)  # no round depends on another one
        try:
            self.controller = controller_for(controller, maker.config, self.env, run_seed)
        except BaseException:
            self.close()
            raise
        self.facts: dict[str, Any] = {}
        """Facts about each host."""
        self.meter: ComputeMeter | None = None
        if count_flops and isinstance(self.env, GrowthVectorEnv):
            self.meter = ComputeMeter(self.env.task, self.env.config, self.env.blueprints)
            self.env.backend.map_hosts(watch)

    def prepare(self) -> None:
        env = self.env
        config = env.config
        # Equal for envs whose hosts, left alone, are the same.
        key = (
            type(env),
            config.task,
            config.env.episode_length,
            config.env.baseline_episodes,
            config.run.device,
        )
        if env.baseline is None:
            env.configure(baseline=self.baselines.get(key))
        env.prepare()
        if env.baseline is not None:
            self.baselines[key] = env.baseline
        # The baseline was that of the config's own seed; the hosts are others.
        env.configure(run_seed=self.run_seed)

    def play(self, number: int, grown: Sequence[HostResult] = ()) -> list[HostResult]:
        env = self.env
        # The next episode of the env and the controller is that of this round.
        env.continue_after(number - 1)
        self.controller.episode[:] = number - 1
        played = play_round(env, self.controller)
        accuracy = env.test_accuracy()
        flops = [math.nan] * env.num_envs  # not counted
        if self.meter is not None:
            flops = [self.meter.flops(episode) for episode in env.backend.map_hosts(episodes)]
        layers = env.backend.map_hosts(grown_layers)
        if not layers:  # hosts are simulated
            layers = [GrownLayers()] * env.num_envs
        return [
            HostResult(
                accuracy=float(accuracy[i]),
                loss=float(env.state.committed_loss[i]),
                parameters=float(played.parameters[i]),
                host_parameters=float(env.first_parameters[i]),
                flops=flops[i],
                epochs=float(played.epochs[i]),
                rollbacks=float(played.rollbacks[i]),
                fossils=float(played.fossils[i]),
                kept=kept_seeds(env, i, layers[i]),
                shapes=layers[i].shapes,
                facts={
                    "validation_accuracy": float(played.committed[i]),
                    "return": float(played.returns[i]),
                    **self.facts,
                },
            )
            for i in range(env.num_envs)
        ]

    def close(self) -> None:
        if self._owns_env:
            self.env.close()


@dataclass(frozen=True)
class GrownLayers:
    """The changes of a host by merges."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of its tensors, by name; empty if nothing was merged."""
    leading: Mapping[str, int] = field(default_factory=dict)
    """Number of channels to which the seeds in grown layers keep, by slot."""


def grown_layers(hosts: TrainingBackend) -> list[GrownLayers]:
    """Returns what merges have changed in each host."""
    layers = []
    for host in hosts.hosts:
        training = host.training
        shapes = shapes_of(training.host) if training.grown else {}
        leading = {}
        for name, seed in training.fossils().items():
            if seed.module.leading is not None:
                leading[name] = seed.module.leading
        layers.append(GrownLayers(shapes, leading))
    return layers


def kept_seeds(
    env: SlotVectorEnv,
    i: int,
    layers: GrownLayers,
) -> dict[str, KeptSeed]:
    """Returns the fossils of host ``i`` by slot, in the order in which the host has its slots; {} if simulated."""
    if not isinstance(env, GrowthVectorEnv):
        return {}
    slots = env.state.slots
    spec = env.action_spec
    kept = {}
    for s in np.flatnonzero(slots.fossil[i]).tolist():
        kept[spec.slots[s]] = KeptSeed(
            spec.blueprints[slots.blueprint[i, s]],
            STYLES[slots.style[i, s]],
            float(slots.alpha[i, s]),
            layers.leading.get(spec.slots[s]),
        )
    return kept


def split_pairs(pairs: int, n_envs: int) -> tuple[int, int]:
    """Returns (number of rounds, hosts per round): as few rounds as ``n_envs`` allows, then as few surplus hosts."""
    # Both quotients are rounded up.
    rounds = -(-pairs // n_envs)
    hosts = -(-pairs // max(rounds, 1))
    return rounds, hosts


def in_order(results: Results, pairs: int) -> dict[str, list[HostResult]]:
    """Returns the hosts of the rounds that every arm has finished, in the order of their pairs, at most ``pairs``."""
    # A round that one arm lacks is left out for all.
    complete = sorted(set.intersection(*map(set, results.values())))
    ordered = {}
    for name, rounds in results.items():
        hosts: list[HostResult] = []
        for number in complete:
            hosts += rounds[number]
        ordered[name] = hosts[:pairs]
    return ordered


@one_thread()
def play(
    arms: Mapping[str, ArmRunner],
    pairs: int,
    n_envs: int,
    order: np.random.Generator,
    progress: Progress | None = None,
    results: Results | None = None,
    save: Save | None = None,
) -> dict[str, list[HostResult]]:
    """Plays ``pairs`` hosts with every arm: pair i is the same (env, episode) for each of them.

    The arms of a round are played in random order, so that a change in the machine's speed affects all of them; a
    control waits for its arm.

    Args:
        arms: by name, each for as many hosts a round as :func:`split_pairs` says.
        n_envs: max number of hosts per round.
        order: draws the order of arms; no result depends on it.
        results: rounds that are not played again; new ones are added.
        save: receives each new round before ``progress`` is called.

    Returns the hosts of each arm in the order of their pairs. Raises KeyboardInterrupt if the process that started the
    ranks is gone.
    """
    if results is None:
        results = {}
    for name, arm in arms.items():
        results.setdefault(name, {})
        arm.prepare()
    rounds, _ = split_pairs(pairs, n_envs)
    for number in range(rounds):
        waiting = list(arms)
        while waiting:
            # A control waits until its arm has played the round.
            ready = [name for name in waiting if arms[name].control_of not in waiting]
            name = ready[order.integers(len(ready))]
            waiting.remove(name)
            if number in results[name]:  # by an earlier process
                continue
            arm = arms[name]
            if arm.ranks is not None and arm.ranks.orphaned:
                raise KeyboardInterrupt
            grown: Sequence[HostResult] = ()
            if arm.control_of is not None:
                grown = results[arm.control_of][number]
            started = time.perf_counter()
            hosts = arm.play(number, grown)
            results[name][number] = hosts
            if save is not None:
                save(name, number, hosts, time.perf_counter() - started)
            if progress is not None:
                accuracy = float(np.mean([host.accuracy for host in hosts]))
                progress(ArmPlayed(name, number + 1, rounds, accuracy))
    return in_order(results, pairs)
