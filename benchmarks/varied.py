"""Train PPO on hosts that differ, from nothing, and judge it beside itself at rate zero, a plan, and the advisor.

    python benchmarks/varied.py --seeds 5 --rounds 120     # two hours on two cores; a line for each check and agent
    python benchmarks/varied.py --seeds 10 --first 110 --rounds 10 --every 10 --hide context curves

All agents are judged on the same contexts, which no agent learns from: test accuracy minus price, pp.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

import numpy as np
import torch

from esper.agents.advised import AdvisedController
from esper.agents.controller import (
    Controller,
    EnvView,
    NoGrowth,
    PerEnvController,
    RandomController,
)
from esper.agents.ppo.agent import PPOAgent
from esper.config import TrainingConfig
from esper.core.action import Op
from esper.core.arrays import Float32s, Floats, Ints
from esper.core.observation import FeatureKind, ObservationLayout
from esper.core.state import EpisodeRules
from esper.env.varied import GROUP, SLOTS, VariedVectorEnv
from esper.run.rollout import play_round

JUDGED = 2**31 + 99
"""Run seed of the contexts that judge."""
CONTEXTS = 192
FIRST_SEED = 100
"""First training seed; none of the seeds from here on was used to choose a setting."""

CURVES = (
    *("train_loss", "train_loss_left", "train_accuracy", "train_measured"),
    *("validation_loss", "validation_loss_left", "validation_accuracy"),
    *("loss_gap", "accuracy_gap", "loss_slope", "accuracy_slope"),
    *("best_accuracy", "epochs_since_best", "merge_gain"),
    *("committed_accuracy", "committed_loss", "all_off_accuracy", "all_off_loss"),
)
"""Beginnings of the names of entries that are measured while a host trains."""
SIZES = ("size", "size_share", "flops_share", "epochs_left")
"""Other names of entries that tell contexts apart before the first epoch."""


class FourTimes(PerEnvController):
    """The best single plan of the exam: all layers four times as wide, before the first epoch."""

    def acts_again(self, env: int, view: EnvView) -> bool:
        return True

    def choose(self, env: int, view: EnvView) -> Ints:
        for slot in SLOTS:
            if view.epoch == 0 and view.legal(Op.GERMINATE, slot, "widen_x4"):
                return self.spec.encode(Op.GERMINATE, slot, "widen_x4")
        return self.spec.encode(Op.WAIT)


class Hiding(VariedVectorEnv):
    """Hosts that differ, of which the entries called ``hidden`` read 0 in every observation."""

    def __init__(self, config: TrainingConfig, hidden: str | None) -> None:
        super().__init__(config)
        self.hidden = places(self.layout, hidden)

    def _observe(self, rules: EpisodeRules) -> Float32s:
        observation = super()._observe(rules)
        observation[:, self.hidden] = 0
        return observation


def places(layout: ObservationLayout, hidden: str | None) -> tuple[int, ...]:
    """Returns where entries of the kind ``hidden`` stand in an observation: "context" or "curves", or of none."""
    found = []
    for place, entry in enumerate(layout.entries):
        name = entry.name.split("/")[-1]
        of_context = entry.kind is FeatureKind.FIXED or name in SIZES
        if (hidden == "context" and of_context) or (
            hidden == "curves" and name.startswith(CURVES)
        ):
            found.append(place)
    return tuple(found)


def judge(
    make: Callable[[VariedVectorEnv], Controller], hidden: str | None = None
) -> Floats:
    """Returns the score of each context, and the doublings of its parameters, [2, contexts]."""
    config = TrainingConfig().with_values(env={"n_envs": CONTEXTS})
    with closing(Hiding(config, hidden)) as env:
        env.configure(grouped=False)
        played = play_round(env, make(env), seed=JUDGED)
        doublings = np.log2(played.parameters / env.first_parameters)
        return np.stack([env.test_accuracy(), doublings])


def rule(kind: type[PerEnvController]) -> Callable[[VariedVectorEnv], Controller]:
    return lambda env: kind(env.action_spec, env.layout, env.num_envs)


def told(name: str, found: Floats, alone: Floats, note: str = "") -> None:
    gain = found[0] - alone[0]
    error = 1.96 * gain.std() / np.sqrt(len(gain))
    print(
        f"{name:28s} {gain.mean():+.2f} ± {error:.2f} pp beside hosts left alone, "
        f"{found[1].mean():.2f} doublings{note}",
        flush=True,
    )


def train(
    seed: int,
    rounds: int,
    every: int,
    rate: float | None,
    group: int,
    alone: Floats,
    cloning: int = 0,
    hidden: str | None = None,
) -> Floats:
    """Trains an agent, judges it after every ``every`` rounds, and returns how it is judged at the end.

    In the first ``cloning`` rounds, it learns to act as the advisor does; what it learns after these begins at a lower
    rate.
    """
    config = TrainingConfig.parse({"run": {"seed": seed}, "ppo": {"group": group}})
    name = f"ppo, seed {seed}" + ("" if rate is None else f", rate {rate:g}")
    if hidden is not None:
        name += f", no {hidden}"
    seconds = 0.0
    with closing(Hiding(config, hidden)) as env:
        ppo = env.config.ppo
        if rate is not None:
            ppo = ppo.model_copy(update={"learning_rate": rate})
        agent = PPOAgent(env.action_spec, env.layout, env.num_envs, ppo, seed)
        clones = ppo.model_copy(update={"update_epochs": 8})
        learns = ppo.model_copy(update={"learning_rate": 3e-4}) if cloning else ppo
        if cloning:
            agent.teacher = AdvisedController(env.action_spec, env.layout, env.num_envs)
        for number in range(rounds):
            began = time.time()
            if number < cloning:
                agent.config = clones
                agent.progress = 0.7 * number / cloning
            else:
                agent.config = learns
                agent.teacher = None
                agent.progress = (number - cloning) / (rounds - cloning)
            env.configure(grouped=agent.teacher is None)
            first = seed if number == 0 else None
            agent.update(play_round(env, agent, seed=first, learner=agent).observation)
            seconds += time.time() - began
            if (number + 1) % every and number + 1 < rounds:
                continue
            found = judge(
                lambda judged: agent.clone_policy(judged.num_envs, seed), hidden
            )
            told(f"{name}, round {number + 1}", found, alone, f"; {seconds:.0f} s")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=FIRST_SEED)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--every", type=int, default=40)
    parser.add_argument("--group", type=int, default=GROUP)
    parser.add_argument("--cloning", type=int, default=0)
    parser.add_argument("--hide", nargs="*", default=(), choices=("context", "curves"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    alone = judge(rule(NoGrowth))
    for kind in (RandomController, FourTimes, AdvisedController):
        told(kind.__name__, judge(rule(kind)), alone)
    seeds = range(chosen.first, chosen.first + chosen.seeds)
    still = []
    trained = []
    blind: dict[str, list[Floats]] = {hidden: [] for hidden in chosen.hide}
    for seed in seeds:
        of_seed = partial(train, seed, group=chosen.group, alone=alone)
        still.append(of_seed(1, 1, 1e-12))
        of_seed = partial(
            of_seed, chosen.rounds, chosen.every, None, cloning=chosen.cloning
        )
        trained.append(of_seed())
        for hidden, found in blind.items():
            found.append(of_seed(hidden=hidden))
    told("mean of ppo at rate 0", np.mean(still, axis=0), alone)
    told("mean of ppo", np.mean(trained, axis=0), alone)
    told("ppo minus itself at rate 0", np.mean(trained, axis=0), np.mean(still, axis=0))
    for hidden, found in blind.items():
        told(f"ppo without {hidden}", np.mean(found, axis=0), alone)
        told(
            f"ppo minus itself without {hidden}",
            np.mean(trained, axis=0),
            np.mean(found, axis=0),
        )


if __name__ == "__main__":
    main()
