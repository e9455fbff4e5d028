"""Controllers, which act in envs: observations and masks in, actions out."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from esper.config import ConfigError
from esper.lifecycle.stage import STAGES, SeedStage
from esper.spaces.action import HEADS, ActionSpec, Op
from esper.spaces.observation import ObservationLayout

Float32s = NDArray[np.float32]
Masks = Mapping[str, NDArray[np.bool_]]


class Controller(Protocol):
    """Acts for E envs: a rule, a trained policy or an agent that learns.

    It sees only what the Gymnasium interface passes. It may have an attribute ``log_prob``, which events report: the
    log-probabilities [E] of the actions that it has just returned.
    """

    episode: NDArray[np.int64]
    """[E]: number of the episode that each env plays."""

    def begin(self) -> None:
        """Starts a new episode in every env."""

    def act(self, observation: Float32s, masks: Masks) -> NDArray[np.int64]:
        """Returns actions int64 [E, 8] for observations [E, size] under ``info["action_mask"]``."""

    def memory_state(self) -> dict[str, Any]:
        """Returns a copy of the state in the running episodes, as tensors and plain values."""

    def load_memory_state(self, state: Mapping[str, Any]) -> None:
        """Continues the episodes in which ``state`` was taken."""


def log_prob_of(controller: Controller, n_envs: int) -> NDArray[np.float64] | None:
    """Returns the log-probabilities [E] of the actions that ``controller`` has just returned; None if it has none.

    Raises ConfigError for another shape.
    """
    given = getattr(controller, "log_prob", None)
    if given is None:
        return None
    found = np.asarray(given, dtype=np.float64)
    if found.shape != (n_envs,):
        name = type(controller).__name__
        raise ConfigError(f"log_prob of {name} has shape {list(found.shape)}; expected [{n_envs}], one number per env")
    return found


class PerEnvController(ABC):
    """Base class of controllers that choose for one env at a time and do not learn."""

    EPISODE_STATE: tuple[str, ...] = ()
    """Names of the attributes that hold its state in running episodes: lists of plain values, one per env."""

    def __init__(self, spec: ActionSpec, layout: ObservationLayout, n_envs: int, run_seed: int = 0) -> None:
        self.spec, self.layout, self.n_envs, self.run_seed = spec, layout, n_envs, run_seed
        self.episode = np.full(n_envs, -1)
        self.steps = np.zeros(n_envs, dtype=np.int64)

    def begin(self, mask: NDArray[np.bool_] | None = None) -> None:
        """Starts new episodes in the envs of ``mask`` bool [E]; None for all."""
        for env in range(self.n_envs):
            if mask is None or mask[env]:
                self.episode[env] += 1
                self.steps[env] = 0
                self.begin_episode(env)

    def act(self, observation: Float32s, masks: Masks) -> NDArray[np.int64]:
        actions = np.zeros((self.n_envs, len(HEADS)), dtype=np.int64)
        for env in range(self.n_envs):
            view = EnvView(self.spec, self.layout, observation[env], {name: mask[env] for name, mask in masks.items()})
            actions[env] = self.choose(env, view)
            self.steps[env] += 1
        return actions

    def memory_state(self) -> dict[str, Any]:
        own = {name: copy.deepcopy(getattr(self, name)) for name in self.EPISODE_STATE}
        return {"episode": self.episode.tolist(), "steps": self.steps.tolist(), "own": own}

    def load_memory_state(self, state: Mapping[str, Any]) -> None:
        self.episode[:], self.steps[:] = state["episode"], state["steps"]
        for name in self.EPISODE_STATE:
            setattr(self, name, copy.deepcopy(state["own"][name]))

    def begin_episode(self, env: int) -> None:  # noqa: B027  most controllers have no state
        """Resets the controller's state for this env."""

    @abstractmethod
    def choose(self, env: int, view: EnvView) -> NDArray[np.int64]:
        """Returns the action int64 [8] of one env."""


@dataclass(frozen=True)
class EnvView:
    """One env's observation and mask, read by name."""

    spec: ActionSpec
    layout: ObservationLayout
    observation: Float32s
    masks: Masks

    def value(self, name: str) -> float:
        return float(self.layout.read(self.observation, name))

    def slot(self, slot: str, name: str) -> float:
        return self.value(f"{slot}/{name}")

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return round(self.value("epoch") * self.layout.horizon)

    @property
    def epochs_left(self) -> int:
        """Number of epochs that are left."""
        return round(math.expm1(self.value("epochs_left")))

    def choice(self, slot: str, blueprint: str, name: str) -> float:
        """Returns an entry of a seed that could be planted."""
        return self.value(f"{slot}/{blueprint}/{name}")

    def epochs_in_stage(self, slot: str) -> int:
        return round(self.slot(slot, "epochs_in_stage") * self.layout.horizon)

    def age(self, slot: str) -> int:
        """Epochs since the slot's seed germinated."""
        return round(self.slot(slot, "age") * self.layout.horizon)

    def stage(self, slot: str) -> SeedStage:
        return next(stage for stage in STAGES if self.slot(slot, f"stage_{stage.name.lower()}") > 0)

    def blueprint(self, slot: str) -> str | None:
        index = round(self.slot(slot, "blueprint"))
        return self.spec.blueprints[index - 1] if index else None

    def legal(self, op: Op, slot: str, blueprint: str | None = None) -> bool:
        place = self.spec.slots.index(slot)
        if not self.masks["op_slot"][op, place]:
            return False
        return blueprint is None or bool(self.masks["slot_blueprint"][place, self.spec.blueprints.index(blueprint)])


class NoGrowth(PerEnvController):
    """Always WAITs, so that the host trains without growing."""

    def choose(self, env: int, view: EnvView) -> NDArray[np.int64]:
        return self.spec.encode(Op.WAIT)
