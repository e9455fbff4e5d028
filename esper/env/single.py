"""One host as a plain ``gymnasium.Env``, for libraries and checkers without support for vector envs."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from esper.core.action import integers_of
from esper.core.arrays import Bools, Float32s, Ints
from esper.env.slot_env import Info, SlotVectorEnv
from esper.training.rng import accepted_seed


class SingleEnv(gymnasium.Env[Float32s, Ints]):
    """The only env of a vector env.

    Observations are float32 [layout.size], actions int64 [8], rewards float; info is that of the vector env without
    its first axis. ``reset(seed=s)`` sets the run seed and starts its episode 0; ``reset()`` starts the next episode.

    Args:
        env: the vector env.
        draws: whether a first reset without a seed draws one, as other envs of Gymnasium do: several in a
            ``SyncVectorEnv`` then play different episodes. Without it, the run seed is that of the config.

    Raises ValueError if ``env`` has several envs, or resets automatically.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  Gymnasium's declaration

    def __init__(self, env: SlotVectorEnv, draws: bool = False) -> None:
        mode = env.metadata["autoreset_mode"]
        if env.num_envs != 1 or mode is not AutoresetMode.DISABLED:
            raise ValueError(
                f"expected a vector env of one env, autoreset DISABLED; got {env.num_envs} with {mode.name}"
            )
        self.env = env
        self.draws = draws
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self.action_spec = env.action_spec
        self.layout = env.layout

    def reset(
        self,
        *,
        seed: int | None = None,
        options: Info | None = None,
    ) -> tuple[Float32s, Info]:
        """Starts an episode. ``options`` are ignored."""
        seed = accepted_seed(seed)
        super().reset(seed=seed)
        # Only the first reset draws: later ones go on with the run seed.
        if seed is None and self.draws:
            seed = int(self.np_random.integers(2**63))
        self.draws = False
        observation, info = self.env.reset(seed=seed)
        return observation[0], of_env(info, 0)

    def step(self, action: Ints) -> tuple[Float32s, float, bool, bool, Info]:
        """Executes an action and trains the host for one epoch.

        Raises ResetNeeded if no episode is going on, and ValueError for an action of another shape, out of range, or
        of anything but integers.
        """
        if self.env.done[0]:
            raise gymnasium.error.ResetNeeded("no episode is going on; call reset() first")
        action = integers_of(action)
        if action.shape != self.action_space.shape:
            raise ValueError(f"the action has shape {action.shape}, expected {self.action_space.shape}")
        observation, rewards, terminated, truncated, info = self.env.step(action[None])
        return (
            observation[0],
            float(rewards[0]),
            bool(terminated[0]),
            bool(truncated[0]),
            of_env(info, 0),
        )

    def action_masks(self) -> Bools:
        """Returns the concatenated masks of the heads, bool [sum of head sizes], as sb3-contrib reads them."""
        return np.asarray(self.env.action_masks()[0])

    def close(self) -> None:
        self.env.close()


def of_env(info: Info, env: int) -> Info:
    """Returns one env's part of ``info``, with Python scalars and copies of arrays.

    It omits keys that start with ``_``, which mark the envs for which other keys are valid.
    """
    part: Info = {}
    for key, value in info.items():
        if isinstance(value, dict):
            part[key] = of_env(value, env)
        elif not key.startswith("_"):
            entry = value[env]
            part[key] = entry.copy() if isinstance(entry, np.ndarray) else entry.item()
    return part
