"""Practice: before it meets real hosts, an agent learns the lifecycle on simulated ones that look like them.

Real hosts are slow, and an agent that knows nothing learns from them first of all to leave them alone: nearly all that
it plants is pruned or unfinished in the end. What it lacks is the same everywhere: what an op does, that a gate has to
pass, that a seed needs time, that what is not kept is lost. All this a planted law teaches in a minute. The worths of
blueprints and slots are drawn anew for every simulated host, so what a blueprint is worth here is left to be learned.

Episodes of several lengths are practised in turn: an agent that knows one length only comes too late with what must be
done before the end of a shorter one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import numpy as np

from esper.config import PPOConfig, TrainingConfig
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import CHANCE, Law
from esper.env.slot_env import SlotVectorEnv
from esper.ppo.agent import PPOAgent
from esper.rollout.rollout import play_round

PRACTICE = 2**31 + 2**30
"""Added to a run's seed, it is the run seed of practice: other draws than those of the real rounds and of held-out
hosts."""


def practice_env(env: SlotVectorEnv, config: TrainingConfig, horizon: int | None = None) -> PlantedVectorEnv:
    """Simulated hosts with the slots, blueprints, horizon and no-growth curve of ``env``, which is prepared.

    A blueprint has one size in all slots: the mean of its largest sizes in the real ones. To another ``horizon`` the
    curve is stretched.
    """
    assert env.rules is not None
    spec, ppo, baseline = env.action_spec, config.ppo, env.rules.baseline
    horizon = horizon or env.horizon
    curve = np.interp(np.linspace(0, env.horizon, horizon + 1), np.arange(env.horizon + 1), baseline.accuracy)
    law = Law(
        slots=spec.slots,
        blueprints=spec.blueprints,
        worth=((ppo.practice_worth,) * len(spec.blueprints),) * len(spec.slots),
        worth_std=ppo.practice_worth_std,
        parameters=tuple(int(size) for size in env.rules.largest.mean(axis=0)),
        gate_parameters=0,
        host_parameters=env.host_parameters,
        curve=tuple(curve.tolist()),
        noise=ppo.practice_noise,
        paired_noise=ppo.practice_paired_noise,
        reliance=ppo.practice_reliance,
        spread=baseline.final_loss_std * 90 / CHANCE,  # losses in the real ones' unit
    )
    return PlantedVectorEnv(config.with_values(env={"n_envs": ppo.practice_envs, "episode_length": horizon}), law)


def practice_rounds(config: PPOConfig, horizon: int) -> list[int]:
    """The horizon of each round of practice, in order: one length after the other, until the steps are used up."""
    turns = cycle(dict.fromkeys(max(1, round(length * horizon)) for length in config.practice_lengths))
    rounds = [next(turns)]
    epochs_left = config.practice_steps // config.practice_envs - rounds[0]
    while (following := next(turns)) <= epochs_left:
        rounds.append(following)
        epochs_left -= following
    return rounds


def practise(env: SlotVectorEnv, config: TrainingConfig, report: Callable[[int, int, float], None]) -> PPOAgent:
    """An agent that has practised for ``ppo.practice_steps`` env steps on hosts like those of ``env``.

    ``report`` is told the round, the number of rounds and the mean return after each; as returns depend on the length
    of episodes, it is the mean over the newest round of every length.
    """
    rounds = practice_rounds(config.ppo, env.horizon)
    simulated = {horizon: practice_env(env, config, horizon) for horizon in dict.fromkeys(rounds)}
    seed = config.run.seed + PRACTICE
    agent = PPOAgent(env.action_spec, env.layout, config.ppo.practice_envs, config.ppo, seed)
    returns: dict[int, float] = {}
    for number, horizon in enumerate(rounds):
        agent.progress = number / len(rounds)
        first = None if horizon in returns else seed + (len(returns) << 32)  # other draws for each length
        played = play_round(simulated[horizon], agent, seed=first, learner=agent)
        agent.learn(played.observation)
        returns[horizon] = float(np.mean(played.returns))
        report(number + 1, len(rounds), float(np.mean(list(returns.values()))))
    return agent
