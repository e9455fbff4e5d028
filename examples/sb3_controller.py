"""A model of sb3-contrib as a controller, compared with hosts left alone; needs sb3-contrib.

python examples/sb3_controller.py [EPISODES]
"""

import sys
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from sb3_contrib import MaskablePPO
from stable_baselines3.common.base_class import BaseAlgorithm

import esper
from esper.core.action import joint_actions
from esper.core.mask import legal_joint_actions
from esper.env.flat_action import FlatAction
from esper.env.slot_env import SlotVectorEnv

EPISODES = 100
if len(sys.argv) > 1:
    EPISODES = int(sys.argv[1])
LESSON = {
    "episode_length": 25,
    "min_prune_age": 25,
    "auto_advance": ["G1", "G2", "G3"],
}


class ModelController:
    """Plays the most likely legal actions of a model that was trained on ``FlatAction`` or ``FlatActionVector``.

    The slots and blueprints of ``env`` must be those that the model has learned on. A recurrent model would also keep
    the state that ``predict`` returns, and return it from ``memory_state``.
    """

    def __init__(self, model: BaseAlgorithm, env: SlotVectorEnv) -> None:
        self.model = model
        self.actions = joint_actions(env.action_spec)
        if model.action_space.n != len(self.actions):
            raise ValueError("the model was trained on other slots or blueprints")
        self.episode = np.full(env.num_envs, -1)

    def begin(self) -> None:
        self.episode += 1

    def act(self, observation: np.ndarray, masks: dict[str, Any]) -> np.ndarray:
        """Returns actions [E, 8] for observations [E, size] under ``info["action_mask"]``."""
        legal = legal_joint_actions(self.actions, masks)
        chosen, _ = self.model.predict(
            observation, action_masks=legal, deterministic=True
        )
        return self.actions[chosen]

    def memory_state(self) -> dict[str, Any]:
        return {"episode": self.episode.tolist()}

    def load_memory_state(self, state: dict[str, Any]) -> None:
        self.episode[:] = state["episode"]


env = FlatAction(gymnasium.make("esper.env:esper/Growth-v0", task="planted", **LESSON))
model = MaskablePPO("MlpPolicy", env, n_steps=250, batch_size=250, gamma=0.995, seed=0)
model.learn(25 * EPISODES)

config = esper.TrainingConfig.parse(
    {"task": {"name": "planted"}, "env": {**LESSON, "n_envs": 5}}
)
# For the command line: model.save("model.zip") here, and in a file `mine.py` a function `make_controller(env)` that
# returns ModelController(MaskablePPO.load("model.zip"), env); `--controller mine.py:make_controller` then plays it.
grown, alone = esper.compare_controllers(
    config, [partial(ModelController, model), "none"], pairs=10
)
print(
    f"test: {grown.accuracy.mean():.2f} % grown by the model, {alone.accuracy.mean():.2f} % alone"
)
