"""Practice: an agent learns the lifecycle on simulated hosts before it meets real ones.

Real hosts are slow, and an untrained agent first learns to leave them alone, because nearly everything it plants is
pruned or unfinished at the end. What it lacks is the same for all hosts: what each op does, that gates have to be
passed, that seeds need time, and that seeds which are not kept are lost. A planted law teaches this in a minute. The
worths of blueprints and slots are redrawn for every simulated world, so the agent still has to learn what a blueprint
is worth on the real ones.

The agent watches: the bandit ``plans`` plays, and the agent learns to act likewise and to predict the returns. If
``ppo.practice_shown`` is below 1, it plays by itself in the rest of practice, from play that already pays.

Practice alternates between several episode lengths: an agent that knows only one length acts too late in shorter
episodes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import numpy as np

from esper.agents.plans import PlansController
from esper.agents.ppo.agent import PPOAgent
from esper.config import PPOConfig, TrainingConfig
from esper.core.blueprints.source import MERGED
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import CHANCE, SimParams
from esper.env.slot_env import SlotVectorEnv
from esper.run.rollout import play_round

PRACTICE = 2**31 + 2**30
"""Offset added to a run's seed for practice, so that its draws differ from those of real rounds and held-out hosts."""


def practice_env(
    env: SlotVectorEnv,
    config: TrainingConfig,
    horizon: int | None = None,
) -> PlantedVectorEnv:
    """Returns simulated hosts with the slots, blueprints, horizon and no-growth curve of ``env``.

    A blueprint has the same size and cost in all slots: the mean of its largest ones where it fits. The curve is
    stretched to ``horizon`` if that is given.
    """
    rules = env.prepare()
    spec = env.action_spec
    ppo = config.ppo
    baseline = rules.baseline
    choices = rules.choices
    horizon = horizon or env.horizon
    # The curve has a value before training and one after each epoch.
    epochs = np.linspace(0, env.horizon, horizon + 1)
    curve = np.interp(epochs, np.arange(env.horizon + 1), baseline.accuracy)
    worths = (ppo.practice_worth,) * len(spec.blueprints)
    fits = choices.parameters > 0
    fitting = fits.sum(axis=0)  # number of slots that each blueprint fits in
    law = SimParams(
        slots=spec.slots,
        blueprints=spec.blueprints,
        worth=(worths,) * len(spec.slots),
        worth_std=ppo.practice_worth_std,
        parameters=tuple(map(int, choices.parameters.sum(axis=0) / fitting)),
        flops=tuple((choices.flops.sum(axis=0) / fitting).tolist()),
        host_flops=choices.host_flops,
        fits=() if fits.all() else tuple(map(tuple, fits.tolist())),
        at_once=tuple(env.loop.backend.at_once.tolist()),
        merges=tuple(name in MERGED for name in spec.blueprints),
        kinds=tuple(map(tuple, choices.kinds.tolist())),
        gate_parameters=0,
        host_parameters=env.host_parameters,
        width=int(choices.widths.max()),
        setting=rules.setting,
        curve=tuple(curve.tolist()),
        unknown=ppo.practice_unknown,
        world_envs=ppo.practice_world_envs,
        world_episodes=ppo.practice_world_episodes,
        noise=ppo.practice_noise,
        paired_noise=ppo.practice_paired_noise,
        reliance=ppo.practice_reliance,
        overlap=ppo.practice_overlap,
        healing=ppo.practice_healing,
        spread=baseline.final_loss_std * 90 / CHANCE,  # in the unit of the real hosts' losses
    )
    return PlantedVectorEnv(config.with_values(env={"n_envs": ppo.practice_envs, "episode_length": horizon}), law)


def practice_rounds(config: PPOConfig, horizon: int) -> list[int]:
    """Returns the horizon of each practice round: lengths take turns until ``practice_steps`` are used up."""
    lengths = [max(1, round(share * horizon)) for share in config.practice_lengths]
    turns = cycle(dict.fromkeys(lengths))  # each length once, in their order
    rounds = [next(turns)]
    epochs_left = config.practice_steps // config.practice_envs - rounds[0]
    length = next(turns)
    while length <= epochs_left:
        rounds.append(length)
        epochs_left -= length
        length = next(turns)
    return rounds


def pretrain(
    env: SlotVectorEnv,
    config: TrainingConfig,
    report: Callable[[int, int, float, float], None],
) -> PPOAgent:
    """Returns an agent that has practised for ``ppo.practice_steps`` env steps on hosts like those of ``env``.

    After each round, ``report`` is called with its number (from 1), the number of rounds, a mean return, and the part
    of the env steps that is done. Returns depend on the episode length, so that mean is taken over the latest round of
    each length.
    """
    rounds = practice_rounds(config.ppo, env.horizon)
    hosts = {horizon: practice_env(env, config, horizon) for horizon in dict.fromkeys(rounds)}
    seed = config.run.seed + PRACTICE
    settings = config.ppo.model_copy(update={"entropy_start": config.ppo.practice_entropy})
    agent = PPOAgent(env.action_spec, env.layout, config.ppo.practice_envs, settings, seed)
    returns: dict[int, float] = {}
    for number, horizon in enumerate(rounds):
        agent.progress = number / len(rounds)
        simulated = hosts[horizon]
        # The teacher plays at first; then the agent does, if any practice is left.
        agent.teacher = None
        if agent.progress < config.ppo.practice_shown:
            agent.teacher = PlansController(
                simulated.action_spec,
                simulated.layout,
                simulated.num_envs,
                config=config,
            )
        first_seed = None
        if horizon not in returns:
            first_seed = seed + (len(returns) << 32)  # different draws for each length
        # Later rounds of a length go on with the next episodes of its hosts.
        played = play_round(simulated, agent, seed=first_seed, learner=agent)
        agent.update(played.observation)
        returns[horizon] = float(np.mean(played.returns))
        mean = float(np.mean(list(returns.values())))
        report(number + 1, len(rounds), mean, sum(rounds[: number + 1]) / sum(rounds))
    agent.teacher = None
    return agent
