"""Wrappers with the joint actions as one ``Discrete``, so that plain PPO and DQN can drive an env."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.spaces import Discrete
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from esper.core.action import ActionSpec, integers_of, joint_actions
from esper.core.arrays import Bools, Float32s, Ints
from esper.core.mask import legal_joint_actions
from esper.env.slot_env import Info

if TYPE_CHECKING:
    VectorWrapperOfActions = VectorWrapper[Float32s, Ints, Float32s, Ints, NDArray[Any]]
else:
    VectorWrapperOfActions = VectorWrapper  # takes no type parameters before Gymnasium 1.4


class FlatTable:
    """The joint actions behind a ``Discrete``: ``actions`` int64 [N, 8]."""

    def __init__(self, spec: ActionSpec) -> None:
        self.actions = joint_actions(spec)
        self.space = Discrete(len(self.actions))

    def look_up(self, chosen: Any, shape: tuple[int, ...] = ()) -> Ints:
        """Returns the actions [*shape, 8] of indices of this ``shape``. Raises ValueError for anything else."""
        last = len(self.actions) - 1
        what = "an action must be an integer"
        if shape:
            what = f"actions must be {shape[0]} integers, each"
        try:
            numbers = integers_of(chosen)
        except ValueError:
            raise ValueError(f"{what} from 0 to {last}, not {chosen!r}") from None
        outside = (numbers < 0) | (numbers > last)
        if numbers.shape != shape or outside.any():
            raise ValueError(f"{what} from 0 to {last}, not {chosen!r}")
        return np.asarray(self.actions[numbers])

    def legal(self, masks: Info) -> NDArray[np.int8]:
        """Converts ``info["action_mask"]`` of E envs to int8 [E, N], the dtype that ``Discrete.sample`` takes."""
        return legal_joint_actions(self.actions, masks).astype(np.int8)


class FlatAction(gymnasium.ActionWrapper[Float32s, np.int64, Ints], RecordConstructorArgs):
    """A ``SingleEnv``, wrapped or not, with a discrete action: the index of a joint action in ``table.actions``.

    ``info["action_mask"]`` is int8 [N], 1 for exactly the legal actions.
    """

    def __init__(self, env: gymnasium.Env[Float32s, Ints]) -> None:
        RecordConstructorArgs.__init__(self)
        super().__init__(env)
        self.table = FlatTable(env.get_wrapper_attr("action_spec"))
        self.action_space = self.table.space
        self._legal = np.zeros(len(self.table.actions), dtype=np.int8)

    def reset(
        self,
        *,
        seed: int | None = None,
        options: Info | None = None,
    ) -> tuple[Float32s, Info]:
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, self._flat(info)

    def step(self, action: np.int64) -> tuple[Float32s, Any, bool, bool, Info]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, self._flat(info)

    def action(self, action: np.int64) -> Ints:
        """Returns the joint action [8] at that index. Raises ValueError for an index out of range."""
        return self.table.look_up(action)

    def action_masks(self) -> Bools:
        """Returns the currently legal actions, bool [N], as sb3-contrib reads them."""
        return self._legal.astype(np.bool_)

    def _flat(self, info: Info) -> Info:
        # The table takes masks of many envs.
        masks = {name: mask[None] for name, mask in info["action_mask"].items()}
        self._legal = self.table.legal(masks)[0]
        return {**info, "action_mask": self._legal.copy()}


class FlatActionVector(VectorWrapperOfActions):
    """A vector env of this package, wrapped or not, with actions [E]: indices of joint actions in ``table.actions``.

    ``info["action_mask"]`` is int8 [E, N], and so is that in ``info["final_info"]``, which is 0 for envs whose episode
    did not end.
    """

    def __init__(self, env: VectorEnv[Float32s, Ints, NDArray[Any]]) -> None:
        super().__init__(env)
        self.table = FlatTable(env.unwrapped.action_spec)  # type: ignore[attr-defined]  # wrappers do not pass it on
        self.single_action_space = self.table.space
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._legal = np.zeros((self.num_envs, len(self.table.actions)), dtype=np.int8)

    def reset(
        self,
        *,
        seed: int | None = None,
        options: Info | None = None,
    ) -> tuple[Float32s, Info]:
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, self._flat(info)

    def step(self, actions: Ints) -> tuple[Float32s, NDArray[Any], NDArray[Any], NDArray[Any], Info]:
        """Executes the joint actions at these indices [E]. Raises ValueError for an index out of range."""
        observation, rewards, terminated, truncated, info = self.env.step(self.table.look_up(actions, (self.num_envs,)))
        return observation, rewards, terminated, truncated, self._flat(info)

    def action_masks(self) -> Bools:
        """Returns the currently legal actions, bool [E, N]."""
        return self._legal.astype(np.bool_)

    def _flat(self, info: Info) -> Info:
        self._legal = self.table.legal(info["action_mask"])
        info = {**info, "action_mask": self._legal.copy()}
        if "final_info" not in info:
            return info
        final_info = info["final_info"]
        legal = self.table.legal(final_info["action_mask"])
        legal[~info["_final_info"]] = 0  # without a final state, not even WAIT is legal
        info["final_info"] = {**final_info, "action_mask": legal}
        return info
