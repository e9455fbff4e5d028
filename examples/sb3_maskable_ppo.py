"""MaskablePPO of sb3-contrib on all hosts of a vector env together; needs sb3-contrib.

python examples/sb3_maskable_ppo.py [ROUNDS] [planted or varied]
"""

import sys
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv
from sb3_contrib import MaskablePPO
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnv

from esper.env.flat_action import FlatActionVector

ROUNDS = 13
if len(sys.argv) > 1:
    ROUNDS = int(sys.argv[1])
TASK = "planted"
if len(sys.argv) > 2:
    TASK = sys.argv[2]
HOSTS, EPOCHS = 64, 25  # a round is 1,600 steps, about one episode of each host

# No pruning, and gates that open by themselves: the agent decides what to plant and keep.
LESSON = {
    "episode_length": EPOCHS,
    "min_prune_age": EPOCHS,
    "auto_advance": ["G1", "G2", "G3"],
}
GAMMA = 0.995
if (
    TASK == "varied"
):  # which draws the lengths of episodes, and pays accuracy minus price
    LESSON = {}
    GAMMA = 1.0


class HostsVecEnv(VecEnv):
    """A vector env with ``autoreset_mode="SameStep"`` behind the API of Stable-Baselines3.

    The horizon is a termination. ``infos`` of an ended episode have its last observation.
    """

    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        super().__init__(
            env.num_envs, env.single_observation_space, env.single_action_space
        )

    def reset(self) -> np.ndarray:
        observation, _ = self.env.reset(seed=self._seeds[0])
        self._reset_seeds()
        return observation

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict]]:
        observation, rewards, terminated, truncated, info = self.env.step(self.actions)
        infos: list[dict] = [{} for _ in range(self.num_envs)]
        for i in np.flatnonzero(terminated | truncated):
            infos[i]["terminal_observation"] = info["final_obs"][i]
            infos[i]["TimeLimit.truncated"] = bool(truncated[i] and not terminated[i])
        return observation, rewards.astype(np.float32), terminated | truncated, infos

    def env_method(self, name: str, *args: Any, indices: Any = None, **_: Any) -> list:
        """Calls a method of the vector env, such as ``action_masks``, and splits its result by env."""
        results = getattr(self.env, name)(*args)
        return [results[i] for i in self._get_indices(indices)]

    def get_attr(self, name: str, indices: Any = None) -> list:
        owner = self.env if hasattr(self.env, name) else self.env.unwrapped
        return [getattr(owner, name) for _ in self._get_indices(indices)]

    def set_attr(self, name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError(f"all hosts are one vector env: set {name} on venv.env")

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        return [False] * len(list(self._get_indices(indices)))

    def close(self) -> None:
        self.env.close()


envs = gymnasium.make_vec(
    "esper.env:esper/Growth-v0", num_envs=HOSTS, task=TASK, **LESSON
)
monitored = VecMonitor(HostsVecEnv(FlatActionVector(envs)))
venv = VecNormalize(monitored, norm_reward=False)
model = MaskablePPO(
    "MlpPolicy",
    venv,
    n_steps=EPOCHS,
    batch_size=800,
    n_epochs=6,
    learning_rate=2e-3,
    gamma=GAMMA,
    seed=0,
)
model.learn(HOSTS * EPOCHS * ROUNDS)

returns = [episode["r"] for episode in model.ep_info_buffer]
print(f"test: mean return {np.mean(returns):.3f} of the last {len(returns)} episodes")
