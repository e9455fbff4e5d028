"""A trained model of Stable-Baselines3 or sb3-contrib as a controller, which plays wherever a controller is given."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Discrete, MultiDiscrete
from numpy.typing import NDArray

from esper.agents.controller import Float32s, Masks
from esper.config import ConfigError
from esper.env.slot_env import SlotVectorEnv
from esper.spaces.action import HEADS, joint_actions
from esper.spaces.mask import legal_joint_actions


class SB3Controller:
    """Plays the likeliest actions of a trained model.

    The model may act on ``FlatActionVector`` (one ``Discrete``) or on the env itself (``MultiDiscrete``). One that
    takes action masks (MaskablePPO) gets them; the illegal actions of others become WAIT and are counted. A recurrent
    one (RecurrentPPO) keeps its state within an episode.

    ``partial(SB3Controller, model)`` is a callable that makes the controller for an env.

    Args:
        model: a model of Stable-Baselines3 or sb3-contrib, or any object with their ``predict``.
        env: the env to play in; its slots and blueprints must be those that the model learned on.
        normalize: the ``VecNormalize`` that it learned with, if any; observations are normalised by its statistics.

    Raises ConfigError if the model's spaces are not those of ``env``.
    """

    def __init__(
        self,
        model: Any,
        env: SlotVectorEnv,
        normalize: Any = None,
    ) -> None:
        self.model = model
        self.normalize = normalize
        self.joint = _joint_actions(model, env)
        self.masked = "action_masks" in inspect.signature(model.predict).parameters
        self.episode = np.full(env.num_envs, -1)
        self.starts = np.ones(env.num_envs, dtype=np.bool_)
        """True for envs whose episode has just begun, [E]."""
        self.state: tuple[NDArray[np.float32], ...] | None = None
        """The memory of a recurrent model."""

    def begin(self) -> None:
        self.episode += 1
        self.starts[:] = True
        self.state = None

    def act(self, observation: Float32s, masks: Masks) -> NDArray[np.int64]:
        """Returns actions int64 [E, 8] for observations [E, size] under ``info["action_mask"]``."""
        if self.normalize is not None:
            observation = self.normalize.normalize_obs(observation)
        options: dict[str, Any] = {}
        if self.masked:  # other models have no such argument
            options["action_masks"] = self._legal(masks)
        chosen, self.state = self.model.predict(
            observation,
            state=self.state,
            episode_start=self.starts,
            deterministic=True,
            **options,
        )
        self.starts = np.zeros_like(self.starts)
        if self.joint is not None:
            chosen = self.joint[chosen]
        return np.asarray(chosen, dtype=np.int64)

    def _legal(self, masks: Masks) -> NDArray[np.bool_]:
        if self.joint is not None:
            return legal_joint_actions(self.joint, masks)
        return np.concatenate([masks[head] for head in HEADS], axis=1)

    def memory_state(self) -> dict[str, Any]:
        state = None
        if self.state is not None:
            state = [torch.tensor(part) for part in self.state]
        return {
            "episode": self.episode.tolist(),
            "starts": self.starts.tolist(),
            "state": state,
        }

    def load_memory_state(self, state: Mapping[str, Any]) -> None:
        self.episode[:] = state["episode"]
        self.starts = np.array(state["starts"], dtype=np.bool_)
        self.state = None
        if state["state"] is not None:
            self.state = tuple(part.numpy().copy() for part in state["state"])


def _joint_actions(model: Any, env: SlotVectorEnv) -> NDArray[np.int64] | None:
    """Returns the actions [N, 8] behind the model's ``Discrete``; None for heads. Raises ConfigError for others."""
    shape = model.observation_space.shape
    if shape != (env.layout.size,):
        raise ConfigError(
            f"the model was trained on observations of shape {shape}, but this env's have {(env.layout.size,)}: a "
            "model plays hosts with as many slots and blueprints as those it learned on"
        )
    joint = joint_actions(env.action_spec)
    space = model.action_space
    if isinstance(space, MultiDiscrete) and tuple(space.nvec) == tuple(env.action_spec.sizes):
        return None
    if isinstance(space, Discrete) and space.n == len(joint):
        return joint
    raise ConfigError(
        f"the model was trained on actions {space}, but this env has Discrete({len(joint)}) through FlatActionVector, "
        f"or {env.single_action_space}: a model plays hosts with the slots and blueprints that it learned on"
    )
