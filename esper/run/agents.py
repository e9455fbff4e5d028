"""The two kinds of agents: a controller that stays as it is, paired with hosts left alone, and one that learns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from esper.config import ConfigError
from esper.config_resolved import ResolvedConfig
from esper.control.controller import NoGrowth, PerEnvController
from esper.control.script import schedule_ships
from esper.env.make import EnvMaker
from esper.env.slot_env import SlotVectorEnv
from esper.evaluation.comparison import ArmResult, play_arms
from esper.evaluation.runner import HELD_OUT, HostResult, MakeController, Results
from esper.ppo.agent import PPOAgent
from esper.ppo.policy import Policy
from esper.ppo.update import UpdateStats
from esper.rollout.collector import Round
from esper.rollout.own_controller import OwnController
from esper.rollout.policies import controller_for
from esper.rollout.pretrain import pretrain
from esper.rollout.rollout import Floats, Rollout
from esper.telemetry.event import Event, PracticeRound

Emit = Callable[[Event], None]
COLUMNS = ("test", "alone", "parameters", "fossils")
"""Results of a controller that stays as it is, by their names in checkpoints."""


class FixedAgent:
    """A controller that does not learn; each of its rounds is repeated by the same hosts left alone.

    Args:
        follows: the controller's name, with the path of the schedule or checkpoint that it actually follows; or a
            callable that makes the controller.
    """

    def __init__(self, maker: EnvMaker, env: SlotVectorEnv, follows: str | OwnController) -> None:
        self.env, self.config = env, maker.config
        controller = controller_for(follows, maker.config, env, maker.config.run.seed)
        self.policy = controller if isinstance(controller, Policy) else None
        """The policy that checkpoints contain; None for a controller without one."""
        self.seed_offset = 0 if isinstance(controller, PerEnvController) else HELD_OUT
        """Added to the run seed of the hosts, because a policy may have learned on those of the run's own seed."""
        # The same run seed, env indices and episode numbers: the same initial weights and batches.
        alone = NoGrowth(env.action_spec, env.layout, env.num_envs)
        self.rollout, self.control = Rollout(env, controller), Rollout(maker.make(), alone)
        self.results: list[Floats] = []
        """Results of each round, [COLUMNS, E]."""

    def update(self, number: int, played: Round) -> None:
        """Records the results of a round."""
        assert played.test is not None
        assert played.control_test is not None
        columns = (played.test, played.control_test, played.stats.parameters, played.stats.fossils)
        self.results.append(np.stack(columns))

    def evaluate(self, emit: Emit, save: Callable[[], None]) -> list[ArmResult]:
        """Returns the arm of the controller and that of the hosts left alone, in the rounds so far."""
        test, alone, parameters, fossils = np.concatenate(self.results, axis=1)
        host = np.full_like(parameters, self.env.host_parameters)
        name = self.config.run.controller
        return [ArmResult(name, test, parameters, fossils), ArmResult("none", alone, host, np.zeros_like(fossils))]

    def state_dict(self) -> dict[str, Any]:
        # One tensor [rounds, E] per column: each tensor adds 250 bytes to the file, whatever its size.
        results = {name: torch.tensor(np.array([each[i] for each in self.results])) for i, name in enumerate(COLUMNS)}
        return {"results": results, "memory": [each.controller.memory_state() for each in (self.rollout, self.control)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        columns = [state["results"][name].numpy() for name in COLUMNS]
        self.results = [np.stack(each) for each in zip(*columns, strict=True)]
        for each, memory in zip((self.rollout, self.control), state["memory"], strict=True):
            each.controller.load_memory_state(memory)


class LearningAgent:
    """An agent that learns from each round; at the end, it is compared with baselines on hosts it never learned on."""

    control, seed_offset = None, 0
    """No hosts are left alone within rounds, and the hosts are those of the run's own seed."""

    def __init__(self, maker: EnvMaker, env: SlotVectorEnv) -> None:
        config = self.config = maker.config
        _check_learning(config)
        self.maker, self.env = maker, env
        # The planted task needs no practice, being simulated itself. After practice, little is left to explore.
        self.pretrained = maker.task is None or config.ppo.practice_steps == 0
        explored = {} if self.pretrained else {"entropy_start": config.ppo.entropy_end}
        settings = config.ppo.model_copy(update=explored)
        device = torch.device(config.ppo.device)
        self.ppo = PPOAgent(env.action_spec, env.layout, env.num_envs, settings, config.run.seed, device)
        self.policy, self.rollout = self.ppo, Rollout(env, self.ppo, learner=self.ppo)
        shipped = ["schedule"] if schedule_ships(config.task.name) else []
        self.baselines = ["none", "random", "heuristic", *shipped]
        for name in self.baselines:
            controller_for(name, config, env, config.run.seed)  # fail now, not after training, if one does not fit
        self.rounds_per_update = (config.ppo.episodes_per_update or env.num_envs) // env.num_envs
        self.compared: Results = {name: {} for name in [config.run.controller, *self.baselines]}
        """Results of the evaluation so far."""

    def pretrain(self, emit: Emit) -> None:
        """Practises on simulated hosts that resemble the real ones."""
        self.ppo.load_from(pretrain(self.env, self.config, lambda *progress: emit(PracticeRound(*progress))))
        self.pretrained = True

    def update(self, number: int, played: Round) -> UpdateStats | None:
        """Learns from the rounds since the last update, if round ``number``, from 1, completes them."""
        rounds = self.config.run.rounds
        if number % self.rounds_per_update and number < rounds:
            return None
        with self.env.spans("update"):
            stats = self.ppo.update(played.stats.observation)
        self.ppo.progress = number / rounds
        return stats

    def evaluate(self, emit: Emit, save: Callable[[], None]) -> list[ArmResult]:
        """Plays the greedy agent and each baseline on ``run.evaluation_pairs`` hosts; the agent's arm is first.

        ``save`` is called after each measurement that has become part of the state.
        """
        config, seed = self.config, self.config.run.seed + HELD_OUT

        def report(event: Event) -> None:
            emit(event)
            save()

        controllers: dict[str, MakeController] = {
            config.run.controller: lambda env: self.ppo.clone_policy(env.num_envs, seed, greedy=True),
            **{name: partial(controller_for, name, config, run_seed=seed) for name in self.baselines},
        }
        pairs = config.run.evaluation_pairs
        return play_arms(self.maker, controllers, pairs, seed, report, self.env.baseline, self.compared)

    def state_dict(self) -> dict[str, Any]:
        return {
            "pretrained": self.pretrained,
            "ppo": self.ppo.state_dict(),
            "buffer": self.ppo.buffer.state_dict(),
            "compared": {
                name: {number: [host.plain() for host in hosts] for number, hosts in rounds.items()}
                for name, rounds in self.compared.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ppo.load_state_dict(state["ppo"])
        self.ppo.buffer.load_state_dict(state["buffer"], self.ppo.device)
        self.pretrained = bool(state["pretrained"])
        for name, rounds in state["compared"].items():
            self.compared[name] = {int(k): [HostResult.parse(host) for host in hosts] for k, hosts in rounds.items()}
        if len({len(hosts) for rounds in self.compared.values() for hosts in rounds.values()}) > 1:
            raise ValueError("rounds of the comparison have different numbers of hosts")


def _check_learning(config: ResolvedConfig) -> None:
    """Raises ConfigError for values that contradict each other in any run of an agent."""
    if config.ppo.gamma != config.reward.gamma:
        raise ConfigError(
            f"ppo.gamma is {config.ppo.gamma} and reward.gamma is {config.reward.gamma}: they must be equal, or the "
            f"potential terms of the reward change which policy is optimal"
        )
    envs, episodes = config.env.n_envs, config.ppo.episodes_per_update
    if episodes is not None and episodes % envs:
        raise ConfigError(
            f"ppo.episodes_per_update is {episodes}, but a round has {envs} episodes (env.n_envs): "
            f"use a multiple of {envs}"
        )
