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
from esper.env.planted_law import Law
from esper.env.slot_env import SlotVectorEnv
from esper.experiment.play import play_round
from esper.ppo.agent import PPOAgent

N_ENVS = 64
WORTH, WORTH_STD = 3.0, 3.0
"""Mean and standard deviation of what a seed is worth, pp."""
NOISE, PAIRED_NOISE, RELIANCE = 1.0, 1.0, 15.0
"""Those of a few hundred validation images, and of a host whose normalisation was trained with its seeds; pp."""


def practice_env(env: SlotVectorEnv, config: TrainingConfig) -> PlantedVectorEnv:
    """Simulated hosts with the slots, blueprints, sizes, horizon and no-growth curve of ``env``, which is prepared."""
    assert env.rules is not None
    spec, curve = env.action_spec, env.rules.baseline.accuracy
    law = Law(
        slots=spec.slots,
        blueprints=spec.blueprints,
        worth=((WORTH,) * len(spec.blueprints),) * len(spec.slots),
        worth_std=WORTH_STD,
        parameters=tuple(int(size) for size in env.rules.largest.mean(axis=0)),
        gate_parameters=0,
        host_parameters=env.host_parameters,
        curve=curve,
        noise=NOISE,
        paired_noise=PAIRED_NOISE,
        reliance=RELIANCE,
    )
    return PlantedVectorEnv(config.with_values(env={"n_envs": N_ENVS}), law)


def practise(env: SlotVectorEnv, config: TrainingConfig, report: Callable[[int, int, float], None]) -> PPOAgent:
    """An agent that has practised for ``ppo.practice_steps`` env steps on hosts like those of ``env``.

    ``report`` is told the round, the number of rounds and the mean return after each.
    """
    simulated = practice_env(env, config)
    seed = config.run.seed
    agent = PPOAgent(simulated.action_spec, simulated.layout, N_ENVS, config.ppo, seed)
    rounds = max(1, config.ppo.practice_steps // (N_ENVS * simulated.horizon))
    for number in range(rounds):
        agent.progress = number / rounds
        played = play_round(simulated, agent, seed=None if number else seed, learner=agent)
        agent.learn(played.observation)
        report(number + 1, rounds, float(np.mean(played.returns)))
    return agent
