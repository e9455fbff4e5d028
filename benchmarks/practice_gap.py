"""Play of an agent on real hosts after practice alone, beside the `plans` that it was shown.

    python benchmarks/practice_gap.py --seeds 5

For each run seed, an agent practises on simulated hosts and then plays five rounds of `digits` without learning, once
with sampled and once with its most likely actions; so does `plans`. Gains are means over the rounds, validation pp
over hosts left alone. The last columns are the cross entropy of the agent to the actions of `plans` in 16 episodes, in
nats per episode: of all, and of the steps in which `plans` waits.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from esper.agents.controller import Controller
from esper.agents.plans import PlansController
from esper.agents.ppo.agent import PPOAgent
from esper.config import TrainingConfig
from esper.env.make import EnvMaker
from esper.env.slot_env import SlotVectorEnv
from esper.rollout.pretrain import pretrain
from esper.rollout.rollout import play_round
from esper.spaces.action import Op

ROUNDS = 5
SHOWN_ROUNDS = 2


def gain(env: SlotVectorEnv, controller: Controller, seed: int) -> float:
    """Returns the mean gain of ``ROUNDS`` rounds, pp; experience starts anew."""
    rounds = [
        play_round(env, controller, seed if number == 0 else None)
        for number in range(ROUNDS)
    ]
    return float(np.mean([end.committed - end.baseline for end in rounds]))


def cross_entropy(
    env: SlotVectorEnv, practised: PPOAgent, seed: int
) -> tuple[float, float]:
    """Returns −Σ ln p(action of `plans`) per episode, over steps with more than one legal op: all, and its WAITs."""
    agent = PPOAgent(env.action_spec, env.layout, env.num_envs, practised.config, seed)
    agent.load_from(practised)
    agent.teacher = PlansController(env.action_spec, env.layout, env.num_envs)
    total = waits = 0.0
    for number in range(SHOWN_ROUNDS):
        observation, info = env.reset(seed=seed if number == 0 else None)
        agent.begin()
        while not env.done.all():
            free = info["action_mask"]["op"].sum(axis=1) > 1
            actions = agent.act(observation, info["action_mask"])
            assert agent.log_prob is not None
            total -= float(agent.log_prob[free].sum())
            waits -= float(agent.log_prob[free & (actions[:, 0] == Op.WAIT)].sum())
            observation, *_, info = env.step(actions)
    episodes = SHOWN_ROUNDS * env.num_envs
    return total / episodes, waits / episodes


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measures how well a practised agent plays real hosts."
    )
    parser.add_argument(
        "--seeds", type=int, default=5, help="number of run seeds, from 0"
    )
    torch.set_num_threads(1)
    rows = []
    print("seed   plans  sampled  greedy  cross entropy  of WAIT")
    for seed in range(parser.parse_args().seeds):
        maker = EnvMaker.of(TrainingConfig.parse({"run": {"seed": seed}}))
        env = maker.make()
        try:
            env.prepare()
            agent = pretrain(env, maker.config, lambda *_round: None)
            plans = PlansController(env.action_spec, env.layout, env.num_envs)
            players: list[Controller] = [
                plans,
                *(
                    agent.clone_policy(env.num_envs, seed, greedy=greedy)
                    for greedy in (False, True)
                ),
            ]
            rows.append(
                [
                    *(gain(env, player, seed) for player in players),
                    *cross_entropy(env, agent, seed),
                ]
            )
        finally:
            env.close()
        print(
            "{:4d}  {:+.2f}    {:+.2f}   {:+.2f}           {:.2f}     {:.2f}".format(
                seed, *rows[-1]
            ),
            flush=True,
        )
    print(
        "mean  {:+.2f}    {:+.2f}   {:+.2f}           {:.2f}     {:.2f}".format(
            *np.mean(rows, axis=0)
        )
    )


if __name__ == "__main__":
    main()
