"""Every reward follows from the observations before and after the step and from the hosts left alone, by separate
arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from esper.agents.controller import Controller, RandomController
from esper.agents.script import ScriptedController, read_schedule, shipped_schedule
from esper.config import Durations, RewardConfig, TrainingConfig
from esper.core.reward_modes import MODES
from esper.core.state import Baseline
from esper.env.planted import PlantedVectorEnv
from esper.env.slot_env import SlotVectorEnv
from tests.core_helpers import DAMAGE, rig
from tests.selection import slow_except

Floats = NDArray[np.float64]
PHI = {
    "germinated": 1.0,
    "training": 2.0,
    "blending": 3.5,
    "holding": 5.5,
    "fossilized": 6.0,
}


class Seen:
    """The observations [E, size] of one moment, by name."""

    def __init__(self, env: SlotVectorEnv, observation: NDArray[np.float32]) -> None:
        self.env, self.observation = env, observation.astype(np.float64)

    def __call__(self, name: str) -> Floats:
        return self.observation[:, self.env.layout.index[name]]

    @property
    def epoch(self) -> NDArray[np.int64]:
        return np.rint(self("epoch") * self.env.horizon).astype(np.int64)

    def lead(self, of: str = "validation") -> Floats:
        """Accuracy above that of hosts left alone, pp."""
        return 100 * self(f"{of}_accuracy") - np.array(self.alone.accuracy)[self.epoch]

    @property
    def alone(self) -> Baseline:
        assert self.env.baseline is not None
        return self.env.baseline

    def loss_lead(self, of: str = "validation") -> Floats:
        """Loss below that of hosts left alone, in standard deviations of their final one."""
        symlog = self(f"{of}_loss")
        nats = np.sign(symlog) * np.expm1(np.abs(symlog)) * np.log(10)
        nats = np.minimum(nats, max(self.alone.loss))
        ahead = np.array(self.alone.loss)[self.epoch] - nats
        return np.asarray(ahead / self.alone.final_loss_std)

    @property
    def ended(self) -> NDArray[np.bool_]:
        return (self("epoch") >= 1 - 1e-6) | (self("rollbacks") >= 1 - 1e-6)

    def climb(self, dwell: int) -> Floats:
        """Φ of the stages."""
        total, after = (
            np.zeros(len(self.observation)),
            dict(zip(PHI, [*PHI.values()][1:], strict=False)),
        )
        for slot in self.env.action_spec.slots:
            done = np.minimum(
                self(f"{slot}/epochs_in_stage") * self.env.horizon / dwell, 1
            )
            for stage, phi in PHI.items():
                total += self(f"{slot}/stage_{stage}") * (
                    phi + 0.9 * (after.get(stage, phi) - phi) * done
                )
        return total


def potential_of(seen: Seen, config: RewardConfig, dwell: int) -> Floats:
    """The potential [E] of a moment that is no end."""
    names = MODES[config.mode]
    potential = np.zeros(len(seen.ended))
    if "stage_potential" in names:
        potential += config.stage_potential * seen.climb(dwell)
    if "contribution_potential" in names:
        helped = seen("validation_accuracy") - seen("all_off_accuracy")
        potential += config.contribution_potential * 100 * helped
    if "loss_contribution_potential" in names:
        helped = seen.loss_lead() - seen.loss_lead("all_off")
        potential += config.loss_contribution_potential * helped
    return potential


def doublings(seen: Seen, entry: str) -> Floats:
    """Doublings of the number of parameters by the seeds of this entry, [E]."""
    budget = seen.env.config.env.parameter_budget
    return np.asarray(np.log2(1 + budget * seen(entry)))


def reward(before: Seen, after: Seen, config: RewardConfig, dwell: int) -> Floats:
    """The reward [E] of the step between two observations."""
    c, ended = config, after.ended
    names = MODES[c.mode]
    waited, germinated = after("last_op_wait") == 1, after("last_op_germinate") == 1
    refused = after("last_op_succeeded") == 0
    # A germination costs the same when it fails, as on a host that is broken.
    cost = np.where(
        germinated, c.germinate_cost, np.where(refused, c.refused_cost, c.action_cost)
    )
    paid: dict[str, Callable[[], Floats]] = {
        "benefit": lambda: ended * after.lead("committed") / c.benefit_scale,
        "loss_benefit": lambda: (
            ended * after.loss_lead("committed") / c.loss_benefit_scale
        ),
        "fossil_cost": lambda: (
            ended * -c.sparse_parameter_cost * after("fossil_parameters")
        ),
        "advantage": lambda: (
            (np.where(ended, after.lead("committed"), after.lead()) - before.lead())
            / c.benefit_scale
        ),
        "rent": lambda: -after("rent") / after.env.horizon,
        "action_cost": lambda: -np.where(waited, 0.0, cost),
        "score": lambda: ended * 100 * after("committed_accuracy") / c.benefit_scale,
        "price": lambda: (
            -c.price
            * (
                np.where(
                    ended,
                    doublings(after, "fossil_parameters"),
                    doublings(after, "added_parameters"),
                )
                - doublings(before, "added_parameters")
            )
            / c.benefit_scale
        ),
        "governor": lambda: -c.rollback_penalty * after("rolled_back"),
    }
    potential = np.where(ended, 0.0, potential_of(after, c, dwell))
    shaping = c.gamma * potential - potential_of(before, c, dwell)
    return shaping + sum(paid[name]() for name in names if name in paid)


def follow(
    env: SlotVectorEnv,
    player: Controller,
    disturb: Callable[[int], None] = lambda _step: None,
) -> set[str]:
    """Plays one episode and computes every reward from the observations; returns the terms that were not 0."""
    dwell = Durations.of(env.config, env.horizon).stage_dwell
    observation, info = env.reset(seed=0)
    player.begin()
    before, running, moved = (
        Seen(env, observation),
        np.ones(env.num_envs, dtype=bool),
        set[str](),
    )
    for step in range(env.horizon):
        disturb(step)
        observation, rewards, terminated, _, info = env.step(
            player.act(observation, info["action_mask"])
        )
        after = Seen(env, observation)
        expected = np.where(
            running, reward(before, after, env.config.reward, dwell), 0.0
        )
        # The observation is float32, and the sd of losses may be a thousandth of them.
        np.testing.assert_allclose(expected, rewards, rtol=1e-4, atol=1e-4)
        moved |= {
            name
            for name, term in info["reward_terms"].items()
            if np.abs(term).max() > 1e-4
        }
        running = ~terminated
        before = after
    assert not running.any()
    return moved


def planted(mode: str, **env: Any) -> PlantedVectorEnv:
    return PlantedVectorEnv(
        TrainingConfig.parse({"env": {"n_envs": 6, **env}, "reward": {"mode": mode}})
    )


@pytest.mark.trap(23)
@pytest.mark.parametrize(
    "mode", slow_except([mode for mode in MODES if "loss" not in mode], MODES)
)
def test_rewards_of_planted_follow_from_what_is_observed(mode: str) -> None:
    env = planted(mode, one_incubating=False)
    moved = follow(env, RandomController(env.action_spec, env.layout, 6, 3))
    schedule = read_schedule(shipped_schedule("planted"))
    moved |= follow(env, ScriptedController(schedule, env.action_spec, env.layout, 6))
    assert moved == set(MODES[mode]) - {"governor"}, "all that the mode pays was tried"


@pytest.mark.trap(23)
@pytest.mark.parametrize("mode", slow_except(["shaped"], MODES))
def test_rewards_of_hosts_in_training_follow_from_what_is_observed(mode: str) -> None:
    """There are rollbacks, and three of them end the episode of env 0 early."""
    sections = {
        "env": {"one_incubating": False, "baseline_episodes": 2},
        "task": {"samples_per_epoch": 256},
    }
    with rig(n_envs=2, horizon=14, reward={"mode": mode}, **sections) as world:
        broken = (3, 8, 10)

        def disturb(step: int) -> None:
            if step in broken:
                DAMAGE["NaN weight"](world.training(0))

        chooser = RandomController(
            world.env.action_spec, world.env.layout, 2, run_seed=2
        )
        moved = follow(world.env, chooser, disturb)
        assert {"governor", "benefit", "loss_benefit", "advantage"} & set(
            MODES[mode]
        ) <= moved
        assert world.host(0).governor.rollbacks == 3
