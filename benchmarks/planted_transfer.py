"""What an agent that learned from planted hosts with three slots does on hosts with fewer, more and other ones.

    python benchmarks/planted_transfer.py --seeds 2 --out benchmarks/results/planted_transfer.json

In the first third of the slots another blueprint is the best one than in the rest, so that an agent has to know where
it is. Nothing is learned on the other hosts. Returns are discounted means over 64 hosts that were not trained on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from esper.config import PPOConfig
from esper.control.controller import Controller
from esper.control.heuristic import HeuristicController
from esper.control.random import RandomController
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import Law
from esper.env.slot_env import SlotVectorEnv
from esper.files.system_info import describe_environment
from esper.ppo.agent import PPOAgent
from esper.ppo.policy import Policy
from esper.rollout.rollout import play_round

HELD_OUT = 999
EARLY = {"moss": 3.0, "fern": 8.0, "oak": -4.0, "ivy": -3.0, "reed": 5.0}
LATE = {"moss": -3.0, "fern": 3.0, "oak": 9.0, "ivy": -5.0, "reed": 5.0}
PARAMETERS = {"moss": 100, "fern": 300, "oak": 600, "ivy": 400, "reed": 300}
KNOWN = ("moss", "fern", "oak", "ivy")
HOSTS = {
    "3 slots, as learned": (3, KNOWN),
    "2 slots": (2, KNOWN),
    "6 slots": (6, KNOWN),
    "3 slots, blueprints in another order": (3, ("ivy", "oak", "fern", "moss")),
    "3 slots, one blueprint unknown, one missing": (3, ("reed", "moss", "fern", "ivy")),
}


def hosts(slots: int, blueprints: tuple[str, ...]) -> PlantedVectorEnv:
    worths = [EARLY if (i + 0.5) / slots < 1 / 3 else LATE for i in range(slots)]
    law = Law(
        slots=tuple(f"r{i}c0" for i in range(slots)),
        blueprints=blueprints,
        worth=tuple(tuple(worth[name] for name in blueprints) for worth in worths),
        parameters=tuple(PARAMETERS[name] for name in blueprints),
    )
    return PlantedVectorEnv(law=law)


def learned(seed: int, rounds: int) -> PPOAgent:
    env = hosts(*HOSTS["3 slots, as learned"])
    agent = PPOAgent(env.action_spec, env.layout, env.num_envs, PPOConfig(), run_seed=seed)
    for number in range(rounds):
        agent.progress = number / rounds
        agent.update(play_round(env, agent, seed=None if number else seed, learner=agent).observation)
    return agent


def played(make: Callable[[SlotVectorEnv], Controller]) -> dict[str, dict[str, float]]:
    """The mean return and seeds kept on each kind of host."""
    found = {}
    for name, kind in HOSTS.items():
        env = hosts(*kind)
        end = play_round(env, make(env), HELD_OUT)
        found[name] = {"return": float(end.returns.mean()), "kept": float(end.fossils.mean())}
        print(f"  {name}: return {found[name]['return']:.3f}, {found[name]['kept']:.1f} kept", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    facts: dict[str, Any] = {}
    for seed in range(arguments.seeds):
        agent = learned(seed, arguments.rounds)

        def other(env: SlotVectorEnv, agent: PPOAgent = agent) -> Policy:
            policy = Policy(env.action_spec, env.layout, env.num_envs, agent.config, HELD_OUT, greedy=True)
            policy.load_policy_state(agent.policy_state())
            return policy

        print(f"seed {seed}, likeliest actions")
        facts[f"seed {seed}"] = played(other)
    print("heuristic")
    facts["heuristic"] = played(lambda env: HeuristicController(env.action_spec, env.layout, env.num_envs))
    print("random")
    facts["random"] = played(lambda env: RandomController(env.action_spec, env.layout, env.num_envs, HELD_OUT))
    environment = describe_environment()
    environment["modules"] = sorted(environment["modules"])
    arguments.out.write_text(json.dumps({**facts, "environment": environment}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
