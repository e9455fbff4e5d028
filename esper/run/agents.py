"""Agents of a run: a controller that stays as it is, paired with hosts left alone, or one that learns."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch

from esper.agents.controller import Controller, NoGrowth, PerEnvController
from esper.agents.make import OwnController, controller_for
from esper.agents.ppo.agent import PPOAgent
from esper.agents.ppo.policy import Policy
from esper.agents.ppo.update import UpdateStats
from esper.agents.script import shipped_schedule_fits
from esper.agents.spec import UNTRAINED
from esper.compare.comparison import ArmResult, play_held_out
from esper.compare.runner import HostResult, Results
from esper.data.facts import check_learning
from esper.data.names import DRAWN, SIMULATED
from esper.env.make import EnvMaker
from esper.env.slot_env import SlotVectorEnv
from esper.files.checkpoint import State, policy_state
from esper.run.rollout import Floats, Rollout, Round
from esper.telemetry.event import AgentValidated, Event
from esper.training.rng import HELD_OUT

Emit = Callable[[Event], None]
VALIDATION = 7 * 2**29
"""Added to a run's seed for the hosts by which the best agent is chosen; others than those of rounds and of the
comparison."""
BASELINES = ("none", "random", "heuristic")
"""Controllers with which a learning one is compared, beside itself and a schedule that is shipped for the task."""
BASELINES_OF_DRAWN = ("none", "random", "advisor")
"""The same where hosts are drawn for each episode, and the rule's long trials are too slow."""
COLUMNS = ("test", "alone", "parameters", "fossils", "host")
"""Results of a controller that stays as it is, by their names in checkpoints."""


class Agent(ABC):
    """Base class of the agents of a run; by default, an agent is not validated."""

    rollout: Rollout
    control: Rollout | None = None
    """Plays the same hosts without growth in each round; None if none are left alone."""
    seed_offset = 0
    """Added to the run seed of the hosts."""
    validated = 0
    """The last round after which the agent was validated."""

    def __init__(self, maker: EnvMaker, env: SlotVectorEnv) -> None:
        self.maker = maker
        self.env = env
        self.config = maker.config

    def validate(self, number: int, between_steps: Callable[[], None]) -> AgentValidated | None:
        """Measures the agent after round ``number``, if that is due and was not done before."""
        return None

    def policy_state(self) -> State | None:
        """Returns the policy that checkpoints contain; None for an agent without one."""
        return None

    @abstractmethod
    def update(self, number: int, played: Round) -> UpdateStats | None:
        """Learns from round ``number``, from 1, or records its results."""

    @abstractmethod
    def evaluate(self, measured: Emit) -> list[ArmResult]:
        """Returns the agent's arm, and those that it is compared with; ``measured`` gets an event for each round."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns all state needed to resume."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads ``state``."""


class FixedAgent(Agent):
    """A controller that does not learn; each of its rounds is repeated by the same hosts left alone.

    Args:
        follows: the controller's name, with the path of the schedule or checkpoint that it actually follows; or a
            callable that makes the controller.
    """

    control: Rollout

    def __init__(
        self,
        maker: EnvMaker,
        env: SlotVectorEnv,
        follows: str | OwnController,
    ) -> None:
        super().__init__(maker, env)
        controller = controller_for(follows, self.config, env, self.config.run.seed)
        # A policy may be of the hosts of the run's own seed.
        if not isinstance(controller, PerEnvController):
            self.seed_offset = HELD_OUT
        self.rollout = Rollout(env, controller)
        # The same run seed, env indices and episode numbers: the same initial weights and batches.
        alone = NoGrowth(env.action_spec, env.layout, env.num_envs)
        self.control = Rollout(maker.make(), alone)
        self.results: list[Floats] = []
        """Results of each round, [COLUMNS, E]."""

    def policy_state(self) -> State | None:
        controller = self.rollout.controller
        if not isinstance(controller, Policy):
            return None
        return policy_state(controller)

    def update(self, number: int, played: Round) -> None:
        test, alone = played.tests  # each [E]
        columns = (test, alone, played.stats.parameters, played.stats.fossils, self.env.first_parameters)
        self.results.append(np.stack(columns))

    def evaluate(self, measured: Emit) -> list[ArmResult]:
        """Returns the arm of the controller and that of the hosts left alone, in the rounds so far."""
        test, alone, parameters, fossils, host = np.concatenate(self.results, axis=1)
        alike = self.config.task.name in SIMULATED
        return [
            ArmResult(self.config.run.controller, test, parameters, fossils, alike),
            ArmResult("none", alone, host, np.zeros_like(fossils), alike),
        ]

    def state_dict(self) -> dict[str, Any]:
        results = {}
        for place, name in enumerate(COLUMNS):
            # One tensor [rounds, E] per column: each tensor adds 250 bytes to the file, whatever its size.
            column = [columns[place] for columns in self.results]
            results[name] = torch.tensor(np.array(column))
        memory = [self.rollout.controller.memory_state(), self.control.controller.memory_state()]
        return {"results": results, "memory": memory}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        results = dict(state["results"])
        # Earlier versions saved no sizes of hosts.
        results.setdefault("host", torch.full_like(results["parameters"], self.env.host_parameters))
        columns = [results[name].numpy() for name in COLUMNS]
        self.results = list(np.stack(columns, axis=1))
        memory, memory_alone = state["memory"]
        self.rollout.controller.load_memory_state(memory)
        self.control.controller.load_memory_state(memory_alone)


class LearningAgent(Agent):
    """PPO: learns from each round, and is compared as it was when it did best on validation hosts.

    The comparison is with baselines, and with the agent before it has learned, on hosts that it never learned on.
    """

    def __init__(self, maker: EnvMaker, env: SlotVectorEnv) -> None:
        check_learning(maker.config, maker.config.env.n_envs)
        super().__init__(maker, env)
        names = list(BASELINES_OF_DRAWN if self.config.task.name in DRAWN else BASELINES)
        # A run that chooses other slots or blueprints is compared without the schedule that names them.
        if shipped_schedule_fits(self.config.task.name, env.action_spec):
            names.append("schedule")
        self.baselines = names
        for name in names:
            controller_for(name, self.config, env, self.config.run.seed)  # fail now if one does not fit
        self.compared: Results = {name: {} for name in [self.config.run.controller, *names, UNTRAINED]}
        """Results of the evaluation so far."""
        config = self.config
        self.ppo = PPOAgent(
            env.action_spec,
            env.layout,
            env.num_envs,
            config.ppo,
            config.run.seed,
            torch.device(config.ppo.device),
        )
        self.follow_advisor(config.ppo.cloning_rounds > 0)
        self.rollout = Rollout(env, self.ppo, learner=self.ppo)
        episodes = config.ppo.episodes_per_update or env.num_envs
        self.rounds_per_update = episodes // env.num_envs
        if self.config.task.name in DRAWN:
            self.validated = -1  # the untrained agent is validated, too
        self.best: dict[str, Any] | None = None
        """The policy that did best on the validation hosts so far."""
        self.best_return = -math.inf
        """Its mean return there."""
        self.best_round = 0
        """The round after which it was kept."""

    def evaluate(self, measured: Emit) -> list[ArmResult]:
        """Plays the agent and each baseline on ``run.evaluation_pairs`` hosts; the agent's arm is first.

        Returns [] if that is 0. ``measured`` is called after each measurement that has become part of the state.
        """
        config = self.config
        pairs = config.run.evaluation_pairs
        if not pairs:
            return []
        run_seed = config.run.seed + HELD_OUT
        controllers: dict[str, str | OwnController] = {
            config.run.controller: partial(self.contender, run_seed=run_seed),
            **dict(zip(self.baselines, self.baselines, strict=True)),
            UNTRAINED: partial(self.untrained, run_seed=run_seed),
        }
        return play_held_out(
            self.maker,
            controllers,
            pairs,
            measured,
            self.env.baseline,
            self.compared,
        )

    def update(self, number: int, played: Round) -> UpdateStats | None:
        """Learns from the rounds since the last update, if round ``number``, from 1, completes them."""
        rounds = self.config.run.rounds
        if number % self.rounds_per_update and number < rounds:
            return None
        with self.env.spans("update"):
            stats = self.ppo.update(played.stats.observation)
        self.ppo.progress = number / rounds
        self.follow_advisor(number < self.config.ppo.cloning_rounds)
        return stats

    def follow_advisor(self, follows: bool) -> None:
        """Sets whether the advisor acts in the agent's place, and the agent learns to act as it does."""
        self.ppo.teacher = None
        if follows:
            from esper.agents.advised import AdvisedController  # few runs need its networks

            env = self.env
            self.ppo.teacher = AdvisedController(env.action_spec, env.layout, env.num_envs)
        self.env.configure(grouped=not follows)

    def validate(self, number: int, between_steps: Callable[[], None]) -> AgentValidated | None:
        """Plays the greedy agent on the validation hosts every ``ppo.validate_every`` rounds and after the last one.

        The hosts are the same each time, and neither those that it learns from nor those of the comparison. An agent
        that does better than all before is kept. Runs in which there would be one such agent have none.
        """
        every = self.config.ppo.validate_every
        rounds = self.config.run.rounds
        due = number % every == 0 or number == rounds
        if not due or number <= self.validated or rounds <= every:
            return None
        rules = {}
        if number == 0:
            for name in self.baselines:
                rules[name] = self.validation_return(between_steps, name)
        achieved = self.validation_return(between_steps)
        self.validated = number
        if achieved > self.best_return:
            self.best_return = achieved
            self.best_round = number
            self.best = copy.deepcopy(self.ppo.policy_state())
        return AgentValidated(
            number,
            achieved,
            self.best_round,
            rules,
        )

    def validation_return(
        self,
        between_steps: Callable[[], None],
        rule: str | None = None,
    ) -> float:
        """Returns the mean discounted return of the greedy agent, or of a rule, on the validation hosts."""
        seed = self.config.run.seed + VALIDATION
        with closing(self.maker.make()) as env:
            env.configure(baseline=self.env.baseline, grouped=False)
            # A copy plays: the agent's episodes and random numbers must not change.
            policy: Controller = self.ppo.clone_policy(env.num_envs, seed)
            if rule is not None:
                policy = controller_for(rule, self.config, env, seed)
            rollout = Rollout(env, policy)
            rollout.begin(seed)
            while not rollout.over:
                between_steps()
                rollout.step()
            return float(rollout.returns.mean())

    def policy_state(self) -> State:
        """Returns the policy that did best on the validation hosts, or the present one before the first validation."""
        return {**policy_state(self.ppo), **(self.best or {})}

    def contender(self, env: SlotVectorEnv, run_seed: int) -> Controller:
        """Returns a controller for ``env`` that plays as the agent does, and does not learn."""
        policy = self.ppo.clone_policy(env.num_envs, run_seed)
        policy.load_policy_state(self.policy_state())
        return policy

    def untrained(self, env: SlotVectorEnv, run_seed: int) -> Controller:
        """Returns the agent with its first weights, as with a learning rate of zero."""
        policy = self.ppo.clone_policy(env.num_envs, run_seed)
        first = Policy(env.action_spec, env.layout, 1, self.config.ppo, self.config.run.seed)
        policy.network.load_state_dict(first.network.state_dict())
        return policy

    def state_dict(self) -> dict[str, Any]:
        compared: dict[str, dict[int, Any]] = {}
        for name, rounds in self.compared.items():
            compared[name] = {}
            for number, hosts in rounds.items():
                compared[name][number] = list(map(HostResult.plain, hosts))
        return {
            "compared": compared,
            "ppo": self.ppo.state_dict(),
            "buffer": self.ppo.buffer.state_dict(),
            "teacher": self.ppo.teacher and self.ppo.teacher.memory_state(),
            "best": self.best,
            "best_return": self.best_return,
            "best_round": self.best_round,
            "validated": self.validated,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sizes = set()
        # A run may have been interrupted while its arms were played, so rounds may be missing, but not hosts.
        for name, rounds in state["compared"].items():
            self.compared[name] = {}
            for number, hosts in rounds.items():
                self.compared[name][int(number)] = list(map(HostResult.parse, hosts))
                sizes.add(len(hosts))
        if len(sizes) > 1:
            raise ValueError("rounds of the comparison have different numbers of hosts")
        self.ppo.load_state_dict(state["ppo"])
        self.ppo.buffer.load_state_dict(state["buffer"], self.ppo.device)
        self.follow_advisor(state["teacher"] is not None)
        if self.ppo.teacher is not None:
            self.ppo.teacher.load_memory_state(state["teacher"])
        if state["best"] is not None:  # fail now if it does not fit
            self.ppo.clone_policy(1, 0).load_policy_state(state["best"])
        self.best = state["best"]
        self.best_return = float(state["best_return"])
        self.best_round = int(state["best_round"])
        self.validated = int(state["validated"])
