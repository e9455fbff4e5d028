"""The rounds of a run: a controller paired with hosts left alone, or an agent that learns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.config import ConfigError, TrainingConfig
from esper.control.controller import NoGrowth
from esper.control.script import schedule_ships
from esper.env.baseline import Baseline
from esper.env.make import EnvMaker
from esper.env.slot_env import SlotVectorEnv
from esper.evaluation.comparison import ArmResult, play_arms
from esper.evaluation.runner import HELD_OUT, HostResult, MakePlayer, Results
from esper.ppo.agent import PPOAgent
from esper.ppo.policy import Policy
from esper.rollout.interrupt import interrupts_wait
from esper.rollout.policies import make_player
from esper.rollout.pretrain import practise
from esper.rollout.rollout import Game, Played, Player
from esper.telemetry.anomaly import AnomalyDetector
from esper.telemetry.event import ArmPlayed, Event, PolicyUpdated, PracticeRound

Floats = NDArray[np.float64]
Emit = Callable[[Event], None]


@dataclass(frozen=True)
class Round:
    """Result of one round; test accuracies [E] in pp if they were measured."""

    played: Played
    test: Floats | None = None
    alone: Floats | None = None


class Rounds(ABC):
    """Base class for the rounds of a run: :meth:`play` may be interrupted at any time, :meth:`take` never is."""

    def __init__(self, maker: EnvMaker, emit: Emit) -> None:
        self.maker, self.config = maker, maker.config
        self.env = maker.make(emit=emit)
        self.games: list[Game] = []
        """Games of the current round that have begun, in playing order."""
        self.whole = True
        """Whether the state is consistent and may be saved: no step or load is in progress."""
        self.practised = True
        """Whether practice before the first round is done."""

    @property
    def policy(self) -> Policy | None:
        """The learned policy of this run, or of the checkpoint that it plays; None if there is none."""
        return None

    @property
    def envs(self) -> list[SlotVectorEnv]:
        """All envs that are played."""
        return [self.env]

    def prepare(self, baseline: Baseline | None) -> Baseline | None:
        """Shares one baseline among all envs, measuring it if ``baseline`` is None."""
        self.env.baseline = baseline or self.env.baseline
        self.env.prepare()
        for env in self.envs:
            env.baseline = self.env.baseline
        return self.env.baseline

    def practise(self, emit: Emit) -> None:  # noqa: B027  most rounds need none
        """Practises before the first round; does nothing by default."""

    @abstractmethod
    def seats(self) -> list[Game]:
        """Returns the games of a new round, none of them begun."""

    def play(self, between_steps: Callable[[], None]) -> Round:
        """Plays the next episode of every env, or the rest of the current one.

        ``between_steps`` is called before each step. A first interrupt takes effect at the end of a step, a second one
        at once.
        """
        for place, seat in enumerate(self.seats()):
            if place == len(self.games):
                with self._as_a_whole():
                    seat.begin()
                    self.games.append(seat)
            game = self.games[place]
            while not game.over:
                between_steps()
                with self._as_a_whole():
                    game.step()
        return self.played()

    @contextmanager
    def _as_a_whole(self) -> Iterator[None]:
        with interrupts_wait(again=True):
            self.whole = False
            yield
            self.whole = True

    @abstractmethod
    def played(self) -> Round:
        """Returns the result of the round whose games are over."""

    def take(self, number: int, played: Round) -> list[Event]:
        """Records a round or learns from it, and returns the events to report."""
        self.games.clear()
        return []

    @abstractmethod
    def conclude(self, emit: Emit, keep: Callable[[], None]) -> list[ArmResult]:
        """Returns the arm of the run's controller, then those that it is compared with, all on the same hosts.

        ``keep`` is called after each measurement that has become part of the state.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns all state needed to resume."""
        parts = self.maker.parts
        return {
            "episodes": [torch.from_numpy(env.episode_numbers.copy()) for env in self.envs],
            "games": [game.state_dict() for game in self.games],
            "micro_batches": None if parts is None else parts.count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of :meth:`state_dict`."""
        for env, numbers in zip(self.envs, state["episodes"], strict=True):
            env.episode_numbers[:] = numbers.numpy()
        if self.maker.parts is not None and state["micro_batches"] is not None:
            self.maker.parts.restore(int(state["micro_batches"]))
        self.games = self.seats()[: len(state["games"])]
        for game, saved in zip(self.games, state["games"], strict=True):
            game.load_state_dict(saved)

    def close(self) -> None:
        for env in self.envs:
            env.close()


class PairedRounds(Rounds):
    """Rounds of a controller that does not learn; each round is repeated by the same hosts left alone.

    Args:
        follows: the controller's name, with the path of the schedule or checkpoint that it actually follows.
    """

    def __init__(self, maker: EnvMaker, emit: Emit, follows: str) -> None:
        super().__init__(maker, emit)
        # Paired controls: same run seed, env indices and episode numbers, so the same initial weights and batches.
        self.twins = maker.make()
        self.name = maker.config.run.controller
        try:
            self.player = make_player(follows, maker.config, self.env, maker.config.run.seed)
        except ConfigError:
            self.close()
            raise
        self.alone = NoGrowth(self.env.action_spec, self.env.layout, self.env.num_envs)
        self.columns: dict[str, list[Floats]] = {"test": [], "alone": [], "parameters": [], "fossils": []}

    @property
    def policy(self) -> Policy | None:
        return self.player if isinstance(self.player, Policy) else None

    @property
    def envs(self) -> list[SlotVectorEnv]:
        return [self.env, self.twins]

    def prepare(self, baseline: Baseline | None) -> Baseline | None:
        measured = super().prepare(baseline)
        if self.policy is not None:
            for env in self.envs:  # the policy may have learned on the hosts of this seed
                env.run_seed += HELD_OUT
        return measured

    def seats(self) -> list[Game]:
        return [Game(self.env, self.player), Game(self.twins, self.alone)]

    def played(self) -> Round:
        return Round(self.games[0].end(), self.env.test_accuracy(), self.twins.test_accuracy())

    def take(self, number: int, played: Round) -> list[Event]:
        super().take(number, played)
        assert played.test is not None
        assert played.alone is not None
        row = (played.test, played.alone, played.played.parameters, played.played.fossils)
        for column, values in zip(self.columns.values(), row, strict=True):
            column.append(values)
        return []

    def conclude(self, emit: Emit, keep: Callable[[], None]) -> list[ArmResult]:
        test, alone, parameters, fossils = (np.concatenate(column) for column in self.columns.values())
        host = np.full_like(parameters, self.env.host_parameters)
        return [ArmResult(self.name, test, parameters, fossils), ArmResult("none", alone, host, np.zeros_like(fossils))]

    def state_dict(self) -> dict[str, Any]:
        # One tensor [rounds, E] per column: each tensor adds 250 bytes to the file, whatever its size.
        columns = {name: torch.from_numpy(np.array(column)) for name, column in self.columns.items()}
        memory = {"player": self.player.memory_state(), "alone": self.alone.memory_state()}
        return {**super().state_dict(), "columns": columns, **memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.columns = {name: [v.numpy() for v in state["columns"][name]] for name in self.columns}
        if len({state["columns"][name].shape for name in self.columns}) > 1:
            raise ValueError("its columns of played pairs have different lengths")
        self.player.load_memory_state(state["player"])
        self.alone.load_memory_state(state["alone"])


class LearningRounds(Rounds):
    """Rounds of an agent that learns from each of them; at the end, the agent and each baseline play held-out hosts."""

    def __init__(self, maker: EnvMaker, emit: Emit) -> None:
        _check_learning(maker.config)
        super().__init__(maker, emit)
        env, config = self.env, maker.config
        device = torch.device(config.ppo.device)
        # The planted task needs no practice, being simulated itself. After practice, little is left to explore.
        self.practised = maker.task is None or config.ppo.practice_steps == 0
        explored = {} if self.practised else {"entropy_start": config.ppo.entropy_end}
        settings = config.ppo.model_copy(update=explored)
        self.agent = PPOAgent(env.action_spec, env.layout, env.num_envs, settings, config.run.seed, device)
        shipped = ["schedule"] if schedule_ships(config.task.name) else []
        self.baselines = ["none", "random", "heuristic", *shipped]
        for name in self.baselines:
            make_player(name, config, env, config.run.seed)  # fail now, not after training, if one does not fit
        self.rounds_per_update = (config.ppo.episodes_per_update or env.num_envs) // env.num_envs
        self.env_steps = 0
        self.compared: Results = {name: {} for name in [config.run.controller, *self.baselines]}
        """Results of the final comparison so far, by controller and round."""

    def practise(self, emit: Emit) -> None:
        """Practises on simulated hosts that resemble the real ones."""
        practised = practise(self.env, self.config, lambda number, of, mean: emit(PracticeRound(number, of, mean)))
        self.agent.inherit(practised)
        self.practised = True

    @property
    def policy(self) -> Policy:
        return self.agent

    def seats(self) -> list[Game]:
        return [Game(self.env, self.agent, learner=self.agent)]

    def played(self) -> Round:
        return Round(self.games[0].end())

    def take(self, number: int, played: Round) -> list[Event]:
        super().take(number, played)
        self.env_steps += int(played.played.epochs.sum())
        rounds = self.config.run.rounds or 1
        if number % self.rounds_per_update and number < rounds:
            return []
        with self.env.spans("update"):
            stats = self.agent.learn(played.played.observation)
        self.agent.progress = number / rounds
        told = PolicyUpdated(round=number, env_steps=self.env_steps, **vars(stats))
        detector = AnomalyDetector(self.config.anomaly, self.config.ppo.max_grad_norm, rounds)
        return [told, *detector.look(told)]

    def conclude(self, emit: Emit, keep: Callable[[], None]) -> list[ArmResult]:
        """Compares the agent with each baseline on ``run.evaluation_pairs`` hosts; the agent acts greedily."""
        config = self.config
        seed = config.run.seed + HELD_OUT

        def learned(env: SlotVectorEnv) -> Player:
            return self.agent.player(env.num_envs, seed, greedy=True)

        def baseline(name: str) -> MakePlayer:
            return lambda env: make_player(name, config, env, seed)

        def report(event: ArmPlayed) -> None:
            emit(event)
            keep()

        players = {config.run.controller: learned, **{name: baseline(name) for name in self.baselines}}
        pairs = config.run.evaluation_pairs
        return play_arms(self.maker, players, pairs, seed, report, self.env.baseline, self.compared)

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "practised": self.practised,
            "agent": self.agent.state_dict(),
            "rollout": self.agent.buffer.state_dict(),
            "env_steps": self.env_steps,
            "compared": {
                name: {number: [host.plain() for host in hosts] for number, hosts in rounds.items()}
                for name, rounds in self.compared.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.agent.load_state_dict(state["agent"])
        self.agent.buffer.load_state_dict(state["rollout"], self.agent.device)
        self.env_steps, self.practised = int(state["env_steps"]), bool(state["practised"])
        for name, rounds in state["compared"].items():
            self.compared[name] = {int(k): [HostResult.parse(host) for host in hosts] for k, hosts in rounds.items()}
        if len({len(hosts) for rounds in self.compared.values() for hosts in rounds.values()}) > 1:
            raise ValueError("rounds of the comparison have different numbers of hosts")


def _check_learning(config: TrainingConfig) -> None:
    """Raises ConfigError for values that contradict each other in any run of an agent."""
    if config.ppo.gamma != config.reward.gamma:
        raise ConfigError(
            f"ppo.gamma is {config.ppo.gamma} and reward.gamma is {config.reward.gamma}: they must be equal, or the "
            f"potential terms of the reward change which policy is optimal"
        )
    envs, episodes = config.env.n_envs or 1, config.ppo.episodes_per_update
    if episodes is not None and episodes % envs:
        raise ConfigError(
            f"ppo.episodes_per_update is {episodes}, but a round has {envs} episodes (env.n_envs): "
            f"use a multiple of {envs}"
        )
