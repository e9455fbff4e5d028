"""Practice: before it meets real hosts, an agent learns the lifecycle on simulated ones that look like them.

Real hosts are slow, and an agent that knows nothing learns from them first of all to leave them alone: nearly all that
it plants is pruned or unfinished in the end. What it lacks is the same everywhere: what an op does, that a gate has to
pass, that a seed needs time, that what is not kept is lost. All this a planted law teaches in a minute. The worths of
blueprints and slots are drawn anew for every simulated host, so what a blueprint is worth here is left to be learned.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from esper.config import TrainingConfig
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import CHANCE, Law
from esper.env.slot_env import SlotVectorEnv
from esper.experiment.play import play_round
from esper.ppo.agent import PPOAgent

PRACTICE = 2**31 + 2**30
"""Added to a run's seed, it is the run seed of practice: other draws than those of the real rounds and of held-out
hosts."""


def practice_env(env: SlotVectorEnv, config: TrainingConfig) -> PlantedVectorEnv:
    """Simulated hosts with the slots, blueprints, horizon and no-growth curve of ``env``, which is prepared.

    A blueprint has one size in all slots: the mean of its largest sizes in the real ones.
    """
    assert env.rules is not None
    spec, ppo, baseline = env.action_spec, config.ppo, env.rules.baseline
    law = Law(
        slots=spec.slots,
        blueprints=spec.blueprints,
        worth=((ppo.practice_worth,) * len(spec.blueprints),) * len(spec.slots),
        worth_std=ppo.practice_worth_std,
        parameters=tuple(int(size) for size in env.rules.largest.mean(axis=0)),
        gate_parameters=0,
        host_parameters=env.host_parameters,
        curve=baseline.accuracy,
        noise=ppo.practice_noise,
        paired_noise=ppo.practice_paired_noise,
        reliance=ppo.practice_reliance,
        spread=baseline.final_loss_std * 90 / CHANCE,  # losses in the real ones' unit
    )
    return PlantedVectorEnv(config.with_values(env={"n_envs": ppo.practice_envs}), law)


def practise(env: SlotVectorEnv, config: TrainingConfig, report: Callable[[int, int, float], None]) -> PPOAgent:
    """An agent that has practised for ``ppo.practice_steps`` env steps on hosts like those of ``env``.

    ``report`` is told the round, the number of rounds and the mean return after each.
    """
    simulated = practice_env(env, config)
    seed = config.run.seed + PRACTICE
    agent = PPOAgent(simulated.action_spec, simulated.layout, simulated.num_envs, config.ppo, seed)
    rounds = max(1, config.ppo.practice_steps // (simulated.num_envs * simulated.horizon))
    for number in range(rounds):
        agent.progress = number / rounds
        played = play_round(simulated, agent, seed=None if number else seed, learner=agent)
        agent.learn(played.observation)
        report(number + 1, rounds, float(np.mean(played.returns)))
    return agent
