"""PPO on simulated hosts whose worths are drawn for each episode, beside a rule that tries seeds out.

    python -m benchmarks.planted_drawn --seeds 5

The worths of each slot are those of the planted law in an order that is drawn for each host, and one seed may be kept:
nothing that was learned of a blueprint helps, only its trial does. A plan plants the same seed in each host; the rule
keeps the first seed that is good enough after k epochs of trial, with k and what is enough chosen on training worlds.
Returns are those of rewards, means over 256 hosts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing
from itertools import product

import numpy as np
import torch

from esper.agents.controller import Controller, EnvView, NoGrowth, PerEnvController
from esper.agents.ppo.agent import PPOAgent
from esper.config import TrainingConfig
from esper.core.action import Op
from esper.core.arrays import Bools, Floats, Ints
from esper.core.stage import SeedStage
from esper.env.planted import PlantedVectorEnv
from esper.run.rollout import play_round

TUNED_ON = 7
JUDGED = 999
HOSTS = 256
FIRST_SEED = 100
TRIAL_EPOCHS = (1, 2, 3, 4, 6)
LEAST = (-np.inf, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
"""Trials that are good enough, pp; the first keeps every seed."""


class DrawnWorths(PlantedVectorEnv):
    """Simulated hosts: in each episode of a host, the worths of a slot belong to other blueprints."""

    def take_hosts(self, starting: Bools) -> None:
        worths = np.array(self.law.worth)
        if self.backend.worth.ndim == 2:
            self.backend.worth = np.tile(worths, (self.num_envs, 1, 1))
        for row in np.flatnonzero(starting).tolist():
            episode = int(self.state.episode[row]) + 1
            draw = np.random.default_rng([self.run_seed, row, episode])
            self.backend.worth[row] = draw.permuted(worths, axis=1)
        super().take_hosts(starting)


class TrialRule(PerEnvController):
    """Plants one seed after another, and keeps the first whose trial after ``trial_epochs`` is above ``least`` pp."""

    EPISODE_STATE = ("planted",)
    trial_epochs = 1
    least = -np.inf

    def prepare(self) -> None:
        pairs = product(self.spec.blueprints, self.spec.slots)
        self.candidates = [[slot, blueprint] for blueprint, slot in pairs]
        self.planted = [0] * self.n_envs
        """Number of seeds that were planted, by env."""

    def begin_episode(self, env: int) -> None:
        self.planted[env] = 0

    def choose(self, env: int, view: EnvView) -> Ints:
        for slot in self.spec.slots:
            on_trial = view.stage(slot) is SeedStage.TRAINING
            if on_trial and view.epochs_in_stage(slot) < self.trial_epochs:
                continue
            # Observations are in units of 10 pp.
            fails = on_trial and 10 * view.slot(slot, "trial") < self.least
            if fails and view.legal(Op.PRUNE, slot):
                return self.spec.encode(Op.PRUNE, slot)
            for op in (Op.FOSSILIZE, Op.ADVANCE):
                if view.legal(op, slot) and view.slot(slot, "gate_passed"):
                    return self.spec.encode(op, slot)
        slot, blueprint = self.candidates[self.planted[env] % len(self.candidates)]
        if view.legal(Op.GERMINATE, slot, blueprint):
            self.planted[env] += 1
            return self.spec.encode(Op.GERMINATE, slot, blueprint)
        return self.spec.encode(Op.WAIT)


def rule(trial_epochs: int, least: float) -> Callable[[DrawnWorths], Controller]:
    def make(env: DrawnWorths) -> Controller:
        made = TrialRule(env.action_spec, env.layout, env.num_envs)
        made.trial_epochs = trial_epochs
        made.least = least
        return made

    return make


def hosts(count: int) -> DrawnWorths:
    return DrawnWorths(
        TrainingConfig.parse({"env": {"n_envs": count, "max_fossils": 1}})
    )


def returns_of(make: Callable[[DrawnWorths], Controller], seed: int) -> Floats:
    """Returns the return of each host, [E]."""
    with closing(hosts(HOSTS)) as env:
        return np.asarray(play_round(env, make(env), seed=seed).returns)


def train(
    seed: int, rounds: int, rate: float | None
) -> Callable[[DrawnWorths], Controller]:
    """Trains an agent with new weights, and returns what makes a controller that plays as the agent does."""
    with closing(hosts(64)) as env:
        ppo = env.config.ppo
        if rate is not None:
            ppo = ppo.model_copy(update={"learning_rate": rate})
        agent = PPOAgent(env.action_spec, env.layout, env.num_envs, ppo, seed)
        for number in range(rounds):
            agent.progress = number / rounds
            first = seed if number == 0 else None
            agent.update(play_round(env, agent, seed=first, learner=agent).observation)
        return lambda judged: agent.clone_policy(judged.num_envs, seed)


def told(name: str, returns: Floats) -> float:
    error = 1.96 * returns.std() / np.sqrt(len(returns))
    print(f"{name:36s} {returns.mean():+.3f} ± {error:.3f}", flush=True)
    return float(returns.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=120)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    tuned = {}
    for setting in product(TRIAL_EPOCHS, LEAST):
        tuned[setting] = returns_of(rule(*setting), TUNED_ON).mean()
    best = max(tuned, key=lambda key: tuned[key])
    told(
        "left alone",
        returns_of(
            lambda env: NoGrowth(env.action_spec, env.layout, env.num_envs), JUDGED
        ),
    )
    plan = told("the same seed in each host", returns_of(rule(1, -np.inf), JUDGED))
    tried = told(
        f"trials of {best[0]} epochs, above {best[1]:g} pp",
        returns_of(rule(*best), JUDGED),
    )
    trained = []
    for seed in range(FIRST_SEED, FIRST_SEED + chosen.seeds):
        told(f"PPO at rate 0, seed {seed}", returns_of(train(seed, 1, 1e-12), JUDGED))
        trained.append(
            told(
                f"PPO, seed {seed}",
                returns_of(train(seed, chosen.rounds, None), JUDGED),
            )
        )
    share = (np.array(trained) - plan) / (tried - plan)
    print(
        f"PPO's share of what lies between the plan and the rule: {share.mean():.2f}, {np.round(share, 2)}"
    )


if __name__ == "__main__":
    main()
