"""What a run does with its rounds: show a controller beside hosts left alone, or let an agent learn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
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
from esper.experiment.compare import Arm, play_arms
from esper.experiment.comparison.side import HELD_OUT, MakePlayer
from esper.experiment.play import Played, Player, play_round
from esper.experiment.players import make_player
from esper.experiment.practice import practise
from esper.ppo.agent import PPOAgent
from esper.ppo.policy import Policy
from esper.telemetry.event import Event, PolicyUpdated, PracticeRound

Floats = NDArray[np.float64]
Emit = Callable[[Event], None]


@dataclass(frozen=True)
class Round:
    """One round as it was played; test accuracies pp [E] where they were measured."""

    played: Played
    test: Floats | None = None
    alone: Floats | None = None


class Rounds(ABC):
    """A round is played, which an interrupt may end at any moment, and then taken in, which is never cut short."""

    def __init__(self, maker: EnvMaker, emit: Emit) -> None:
        self.maker, self.config = maker, maker.config
        self.env = maker.make(emit=emit)

    @property
    def policy(self) -> Policy | None:
        """What has been learned, by this run or by the one whose checkpoint it plays."""
        return None

    @property
    def envs(self) -> list[SlotVectorEnv]:
        """All that is played in."""
        return [self.env]

    def prepare(self, baseline: Baseline | None) -> Baseline | None:
        """Share one baseline among all envs; None measures it."""
        self.env.baseline = baseline or self.env.baseline
        self.env.prepare()
        for env in self.envs:
            env.baseline = self.env.baseline
        return self.env.baseline

    def practise(self, emit: Emit) -> None:  # noqa: B027  most rounds need none
        """Whatever comes before the first round."""

    @abstractmethod
    def play(self) -> Round:
        """The next episode of every env."""

    @abstractmethod
    def take(self, number: int, played: Round) -> list[Event]:
        """Keep or learn from a round; what there is to report of it."""

    @abstractmethod
    def conclude(self, emit: Emit) -> list[Arm]:
        """The run's controller, first, and what it is compared with, on the same hosts."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rounds to come depend on."""
        parts = self.maker.parts
        return {
            "episodes": [torch.from_numpy(env.episode_numbers.copy()) for env in self.envs],
            "micro_batches": None if parts is None else parts.count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From :meth:`state_dict`."""
        for env, numbers in zip(self.envs, state["episodes"], strict=True):
            env.episode_numbers[:] = numbers.numpy()
        if self.maker.parts is not None and state.get("micro_batches") is not None:
            self.maker.parts.restore(int(state["micro_batches"]))

    def close(self) -> None:
        for env in self.envs:
            env.close()


class PairedRounds(Rounds):
    """A controller that does not learn: every round is played again by hosts left alone, and every pair is evidence.

    Args:
        follows: the controller's name with what it follows, a schedule or a checkpoint, at another place.
    """

    def __init__(self, maker: EnvMaker, emit: Emit, follows: str) -> None:
        super().__init__(maker, emit)
        # The same hosts left alone: same run seed, env indices and episode numbers, so the same weights and batches.
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
            for env in self.envs:  # it may have learned from the hosts of this very seed
                env.run_seed += HELD_OUT
        return measured

    def play(self) -> Round:
        played, test = play_round(self.env, self.player), self.env.test_accuracy()
        play_round(self.twins, self.alone)
        return Round(played, test, self.twins.test_accuracy())

    def take(self, number: int, played: Round) -> list[Event]:
        assert played.test is not None
        assert played.alone is not None
        row = (played.test, played.alone, played.played.parameters, played.played.fossils)
        for column, values in zip(self.columns.values(), row, strict=True):
            column.append(values)
        return []

    def conclude(self, emit: Emit) -> list[Arm]:
        test, alone, parameters, fossils = (np.concatenate(column) for column in self.columns.values())
        host = np.full_like(parameters, self.env.host_parameters)
        return [Arm(self.name, test, parameters, fossils), Arm("none", alone, host, np.zeros_like(fossils))]

    def state_dict(self) -> dict[str, Any]:
        # One tensor [rounds, E] each: a tensor by itself takes 250 bytes of a file, whatever it holds.
        columns = {name: torch.from_numpy(np.array(column)) for name, column in self.columns.items()}
        return {**super().state_dict(), "columns": columns, "steps": torch.from_numpy(self.player.episode.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.columns = {name: [v.numpy() for v in column] for name, column in state["columns"].items()}
        self.player.episode[:] = state["steps"].numpy()


class LearningRounds(Rounds):
    """An agent that learns from every round; in the end it plays hosts that it never saw, beside each baseline."""

    def __init__(self, maker: EnvMaker, emit: Emit) -> None:
        _check_learning(maker.config)
        super().__init__(maker, emit)
        env, config = self.env, maker.config
        device = torch.device(config.ppo.device)
        # Planted hosts are simulated themselves. After practice little is left to explore.
        self.practises = maker.task is not None and config.ppo.practice_steps > 0
        explored = {"entropy_start": config.ppo.entropy_end} if self.practises else {}
        settings = config.ppo.model_copy(update=explored)
        self.agent = PPOAgent(env.action_spec, env.layout, env.num_envs, settings, config.run.seed, device)
        shipped = ["schedule"] if schedule_ships(config.task.name) else []
        self.baselines = ["none", "random", "heuristic", *shipped]
        for name in self.baselines:
            make_player(name, config, env, config.run.seed)  # one that does not fit the host is an error now, not then
        self.rounds_per_update = (config.ppo.episodes_per_update or env.num_envs) // env.num_envs
        self.env_steps = 0

    def practise(self, emit: Emit) -> None:
        """On simulated hosts that look like the real ones."""
        if self.practises:
            practised = practise(self.env, self.config, lambda number, of, mean: emit(PracticeRound(number, of, mean)))
            self.agent.inherit(practised)

    @property
    def policy(self) -> Policy:
        return self.agent

    def play(self) -> Round:
        return Round(play_round(self.env, self.agent, learner=self.agent))

    def take(self, number: int, played: Round) -> list[Event]:
        self.env_steps += int(played.played.epochs.sum())
        rounds = self.config.run.rounds or 1
        if number % self.rounds_per_update and number < rounds:
            return []
        with self.env.spans("update"):
            stats = self.agent.learn(played.played.observation)
        self.agent.progress = number / rounds
        return [PolicyUpdated(round=number, env_steps=self.env_steps, **vars(stats))]

    def conclude(self, emit: Emit) -> list[Arm]:
        """Plays ``run.evaluation_pairs`` hosts; actions are the likeliest ones."""
        config = self.config
        seed = config.run.seed + HELD_OUT

        def learned(env: SlotVectorEnv) -> Player:
            return self.agent.player(env.num_envs, seed, greedy=True)

        def baseline(name: str) -> MakePlayer:
            return lambda env: make_player(name, config, env, seed)

        players = {config.run.controller: learned, **{name: baseline(name) for name in self.baselines}}
        return play_arms(self.maker, players, config.run.evaluation_pairs, seed, emit, self.env.baseline)

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "agent": self.agent.state_dict(),
            "rollout": self.agent.buffer.state_dict(),
            "env_steps": self.env_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.agent.load_state_dict(state["agent"])
        self.agent.buffer.load_state_dict(state["rollout"], self.agent.device)
        self.env_steps = int(state["env_steps"])


def _check_learning(config: TrainingConfig) -> None:
    """Raises ConfigError for values that fit one another in no run of an agent."""
    if config.ppo.gamma != config.reward.gamma:
        raise ConfigError(
            f"ppo.gamma is {config.ppo.gamma} and reward.gamma {config.reward.gamma}: they must be the same, or the "
            f"potential terms of the reward change what is best"
        )
    envs, episodes = config.env.n_envs or 1, config.ppo.episodes_per_update
    if episodes is not None and episodes % envs:
        raise ConfigError(
            f"ppo.episodes_per_update is {episodes}, but a round has {envs} episodes (env.n_envs): "
            f"give a multiple of {envs}"
        )
