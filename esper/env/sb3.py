"""The vector env as a ``VecEnv`` of Stable-Baselines3, so that its agents train all hosts together.

Importing this module requires stable_baselines3, which Esper itself does not need.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from esper.env.info import Info, of_env
from esper.spaces.arrays import Bools, Float32s, Ints

try:
    from stable_baselines3.common.vec_env.base_vec_env import VecEnv, VecEnvIndices, VecEnvStepReturn
except ImportError as error:
    raise ImportError(
        "esper.env.sb3 needs Stable-Baselines3; pip install stable-baselines3 (or sb3-contrib, for MaskablePPO)"
    ) from error


class SB3VecEnv(VecEnv):
    """A vector env of this package behind the API of Stable-Baselines3.

    When an episode ends, ``infos[i]["terminal_observation"]`` is its last observation, the rest of ``infos[i]`` is that
    of its last step, and ``infos[i]["TimeLimit.truncated"]`` is True if it was truncated, so that its value must be
    bootstrapped; the horizon is a termination. Infos have no masks; sb3-contrib reads them with
    ``env_method("action_masks")``.

    ``env`` is a vector env of this package or its ``FlatActionVector``. Raises ValueError unless its autoreset mode is
    SAME_STEP.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        mode = env.metadata["autoreset_mode"]
        if mode is not AutoresetMode.SAME_STEP:
            raise ValueError(f"Stable-Baselines3 needs autoreset_mode=AutoresetMode.SAME_STEP, the env has {mode.name}")
        self.env = env
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

    def reset(self) -> Float32s:
        """Starts an episode in every env, with the run seed passed to ``seed`` since the last reset, if any.

        Raises ValueError if options were set.
        """
        if any(self._options):
            raise ValueError("hosts take no options at a reset: set_options() is not supported")
        observation, info = self.env.reset(seed=self._seeds[0])
        self._reset_seeds()
        self.reset_infos = self._infos(info)
        return np.asarray(observation)

    def step_async(self, actions: Ints) -> None:
        self.actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        observation, rewards, terminated, truncated, info = self.env.step(self.actions)
        done = terminated | truncated
        infos = self._infos(info)
        # At the end of an episode, an env's info is that of the next one, and the last one is in final_info.
        for env in np.flatnonzero(done).tolist():
            self.reset_infos[env] = infos[env]
            last = _without_masks(info["final_info"], env)
            last["terminal_observation"] = info["final_obs"][env]
            infos[env] = last
        for env, cut in enumerate(truncated & ~terminated):
            infos[env]["TimeLimit.truncated"] = bool(cut)
        return observation, rewards.astype(np.float32), done, infos

    def close(self) -> None:
        self.env.close()

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Returns ``action_masks`` of each env; other attributes are those of the vector env, the same for all.

        Raises AttributeError for an unknown attribute."""
        if attr_name == "action_masks":
            return [partial(self._mask_of, env) for env in self._get_indices(indices)]
        owner = self.env if hasattr(self.env, attr_name) else self.env.unwrapped
        value = getattr(owner, attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(
        self,
        attr_name: str,
        value: Any,
        indices: VecEnvIndices = None,
    ) -> None:
        """Always raises AttributeError, since hosts have no attributes of their own."""
        raise AttributeError(f"all hosts are one vector env; set {attr_name} on it: venv.env.{attr_name} = ...")

    def env_method(
        self,
        method_name: str,
        *method_args: Any,
        indices: VecEnvIndices = None,
        **method_kwargs: Any,
    ) -> list[Any]:
        """Calls ``action_masks`` of each env, bool [n]. Raises AttributeError for any other method."""
        if method_name != "action_masks" or method_args or method_kwargs:
            raise AttributeError(f"hosts have no method {method_name!r} with such arguments; they have: action_masks()")
        masks = self.env.action_masks()  # type: ignore[attr-defined]  # not every VectorEnv has this method
        return [masks[env] for env in self._get_indices(indices)]

    def env_is_wrapped(
        self,
        wrapper_class: type[gymnasium.Wrapper],
        indices: VecEnvIndices = None,
    ) -> list[bool]:
        """Returns False for each env: hosts cannot be wrapped one by one."""
        return [False for _ in self._get_indices(indices)]

    def _mask_of(self, env: int) -> Bools:
        return np.asarray(self.env_method("action_masks", indices=env)[0])

    def _infos(self, info: Info) -> list[Info]:
        return [_without_masks(info, env) for env in range(self.num_envs)]


def _without_masks(info: Info, env: int) -> Info:
    left_out = ("action_mask", "final_obs", "final_info")
    rest = {key: value for key, value in info.items() if key not in left_out}
    return of_env(rest, env)
