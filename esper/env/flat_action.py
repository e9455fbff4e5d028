"""Wrappers that offer the legal joint actions as one ``Discrete``, so that plain PPO and DQN can drive an env."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from esper.spaces.action import ActionSpec
from esper.spaces.flat import joint_actions, legal_joint_actions

Float32s = NDArray[np.float32]
Ints = NDArray[np.int64]
Info = dict[str, Any]

if TYPE_CHECKING:
    VectorWrapperOfActions = VectorWrapper[Float32s, Ints, Float32s, Ints, NDArray[Any]]
else:
    VectorWrapperOfActions = VectorWrapper  # takes no type parameters before Gymnasium 1.4


class FlatTable:
    """The list of joint actions behind a ``Discrete``: ``actions`` int64 [N, 8]."""

    def __init__(self, spec: ActionSpec) -> None:
        self.actions = joint_actions(spec)
        self.space = Discrete(len(self.actions))

    def look_up(self, chosen: Any) -> Ints:
        """The rows [..., 8] of chosen numbers [...]. Raises ValueError for one that is not a number of an action."""
        numbers, last = np.asarray(chosen), len(self.actions) - 1
        if not np.issubdtype(numbers.dtype, np.integer) or (numbers < 0).any() or (numbers > last).any():
            raise ValueError(f"an action must be an integer from 0 to {last}, not {chosen!r}")
        return np.asarray(self.actions[numbers])

    def legal(self, masks: Info) -> NDArray[np.int8]:
        """``info["action_mask"]`` of E envs as int8 [E, N], the type that ``Discrete.sample`` takes."""
        return legal_joint_actions(self.actions, masks).astype(np.int8)


class FlatAction(gymnasium.ActionWrapper[Float32s, np.int64, Ints], RecordConstructorArgs):
    """One host, driven by one number: the joint action of that number in ``table.actions``.

    ``info["action_mask"]`` is int8 [N], 1 where that action is legal, exactly.

    Args:
        env: a ``SingleEnv``, wrapped or not.
    """

    def __init__(self, env: gymnasium.Env[Float32s, Ints]) -> None:
        RecordConstructorArgs.__init__(self)
        super().__init__(env)
        self.table = FlatTable(env.get_wrapper_attr("action_spec"))
        self.action_space = self.table.space
        self._legal = np.zeros(len(self.table.actions), dtype=np.int8)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Float32s, Info]:
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, self._flat(info)

    def step(self, action: np.int64) -> tuple[Float32s, Any, bool, bool, Info]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, self._flat(info)

    def action(self, action: np.int64) -> Ints:
        """The joint action [8] of that number. Raises ValueError for a number that is none's."""
        return self.table.look_up(action)

    def action_masks(self) -> NDArray[np.bool_]:
        """What is legal now, bool [N], as sb3-contrib reads it."""
        return self._legal.astype(np.bool_)

    def _flat(self, info: Info) -> Info:
        self._legal = self.table.legal({name: mask[None] for name, mask in info["action_mask"].items()})[0]
        return {**info, "action_mask": self._legal.copy()}


class FlatActionVector(VectorWrapperOfActions):
    """Many hosts, each driven by one number; actions are integers [E].

    ``info["action_mask"]`` is int8 [E, N], and so is that in ``info["final_info"]``, zero where no episode ended.

    Args:
        env: a vector env of this package, wrapped or not.
    """

    def __init__(self, env: VectorEnv[Float32s, Ints, NDArray[Any]]) -> None:
        super().__init__(env)
        self.table = FlatTable(env.unwrapped.action_spec)  # type: ignore[attr-defined]  # wrappers do not pass it on
        self.single_action_space = self.table.space
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._legal = np.zeros((self.num_envs, len(self.table.actions)), dtype=np.int8)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Float32s, Info]:
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, self._flat(info)

    def step(self, actions: Ints) -> tuple[Float32s, NDArray[Any], NDArray[Any], NDArray[Any], Info]:
        """Take the joint actions of these numbers [E]. Raises ValueError for a number that is none's."""
        observation, rewards, terminated, truncated, info = self.env.step(self.table.look_up(actions))
        return observation, rewards, terminated, truncated, self._flat(info)

    def action_masks(self) -> NDArray[np.bool_]:
        """What is legal now, bool [E, N]."""
        return self._legal.astype(np.bool_)

    def _flat(self, info: Info) -> Info:
        self._legal = self.table.legal(info["action_mask"])
        info = {**info, "action_mask": self._legal.copy()}
        if "final_info" in info:
            ended = info["_final_info"]
            final = self.table.legal(info["final_info"]["action_mask"])
            final[~ended] = 0  # WAIT is always legal, but these have no final state
            info["final_info"] = {**info["final_info"], "action_mask": final}
        return info
