"""A foreign agent, sb3-contrib's MaskablePPO, learns on ``planted`` through the public API alone.

Where every op is as likely as any other a seed is soon pruned, and MaskablePPO then settles on WAIT (return −0.01 after
200,000 steps of the task as it ships). A lesson with pruning out of reach shows it that there is something to find.
Discounted returns that the tests measured for seeds 0, 1, 2:

- SHORT, 64,000 steps: flat 1.812, 1.820, 1.828; heads 1.563, 1.712, 1.722. Best 1.876, chance −0.02 to 0.09.
- WHOLE after UNPRUNED, 150,000 and 100,000 steps, heads: 1.687, 1.629, 1.656. Best 1.719, chance −0.17 to −0.14.
- SHORT, 20,000 steps, flat, seed 0: 0.725.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from sb3_contrib import MaskablePPO
from stable_baselines3.common.vec_env import VecNormalize

from esper.agents.random import RandomController
from esper.env.flat_action import FlatActionVector
from esper.env.planted import PlantedVectorEnv
from esper.env.sb3 import SB3VecEnv
from esper.rollout.rollout import play_round
from esper.spaces.action import joint_actions
from esper.spaces.mask import legal_joint_actions

HELD_OUT = 999
N_ENVS = 64
SHORT: dict[str, Any] = {
    "episode_length": 25,
    "min_prune_age": 25,
    "auto_advance": ["G1", "G2", "G3"],
}
"""No pruning, and gates that open by themselves: what is left is what to plant, where, and when to keep it."""
UNPRUNED: dict[str, Any] = {"min_prune_age": 50}
"""The task as it ships, but for pruning."""
WHOLE: dict[str, Any] = {}
"""The task as it ships."""
Lesson = tuple[dict[str, Any], int, float]
"""Settings of an env, the number of env steps to learn in it, and the weight of the entropy bonus."""


class Player:
    """A model behind the API of controllers."""

    def __init__(
        self, model: MaskablePPO, norm: VecNormalize, flat: bool, env: PlantedVectorEnv
    ) -> None:
        self.model, self.norm, self.flat = model, norm, flat
        self.env, self.table = env, joint_actions(env.action_spec)

        self.episode = np.full(env.num_envs, -1)

    def begin(self) -> None:
        self.episode += 1

    def act(self, observation: NDArray[np.float32], masks: Any) -> NDArray[np.int64]:
        legal = (
            legal_joint_actions(self.table, masks)
            if self.flat
            else self.env.action_masks()
        )
        chosen, _ = self.model.predict(
            self.norm.normalize_obs(observation), action_masks=legal
        )
        return self.table[chosen] if self.flat else chosen


def make(settings: dict[str, Any], mode: str) -> VectorEnv[Any, Any, Any]:
    return gymnasium.make_vec(
        "esper/Growth-v0",
        num_envs=N_ENVS,
        task="planted",
        autoreset_mode=mode,
        **settings,
    )


def trained(flat: bool, seed: int, *lessons: Lesson) -> dict[str, float]:
    """Mean discounted returns in the last lesson's env, on a held-out seed: of chance, and of the agent before and
    after all lessons; then with what the last lesson has shown of seeds, which a reset with a seed would forget."""
    exam = make(lessons[-1][0], "Disabled")
    assert isinstance(exam, PlantedVectorEnv)

    def school(settings: dict[str, Any]) -> VecNormalize:
        nonlocal lesson
        lesson = env = make(settings, "SameStep")
        return VecNormalize(
            SB3VecEnv(FlatActionVector(env) if flat else env), norm_reward=False
        )

    lesson: VectorEnv[Any, Any, Any] = exam
    venv = school(lessons[0][0])
    model = MaskablePPO(
        "MlpPolicy",
        venv,
        n_steps=exam.horizon,
        batch_size=800,
        n_epochs=6 if flat else 4,
        learning_rate=2e-3,
        gamma=0.995,
        gae_lambda=0.97,
        policy_kwargs={"net_arch": [128, 128]},
        seed=seed,
        device="cpu",
    )
    player = Player(model, venv, flat, exam)
    chance = RandomController(exam.action_spec, exam.layout, N_ENVS, seed)
    results = {"chance": float(play_round(exam, chance, HELD_OUT).returns.mean())}
    results["before"] = float(play_round(exam, player, HELD_OUT).returns.mean())
    for settings, steps, model.ent_coef in lessons:
        statistics, venv = venv.obs_rms, school(settings)
        venv.obs_rms = statistics
        model.set_env(venv)
        model.learn(steps)
    player.norm = venv
    assert isinstance(lesson, PlantedVectorEnv)
    assert exam.gatherer.give(lesson.gatherer.experiences[0].state_dict())
    results["after"] = float(play_round(exam, player, HELD_OUT).returns.mean())
    results["illegal"] = float(exam.illegal_actions.mean())
    print(
        f"flat {flat}, seed {seed}: "
        + ", ".join(f"{name} {value:.3f}" for name, value in results.items())
    )
    return results


@pytest.mark.slow
def test_maskable_ppo_gets_better() -> None:
    returns = trained(True, 0, (SHORT, 20_000, 0.02))
    assert returns["after"] > max(returns["before"], returns["chance"]) + 0.2
    assert returns["illegal"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("flat", [False, True], ids=["heads", "flat"])
def test_maskable_ppo_learns_what_to_plant(flat: bool, seed: int) -> None:
    assert trained(flat, seed, (SHORT, 64_000, 0.02 if flat else 0.05))["after"] > 1.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_maskable_ppo_learns_the_task_as_it_ships_after_a_lesson_without_pruning(
    seed: int,
) -> None:
    assert (
        trained(False, seed, (UNPRUNED, 150_000, 0.05), (WHOLE, 100_000, 0.01))["after"]
        > 1.0
    )
