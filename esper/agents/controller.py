"""The interface of controllers, the base class of rules, and the rules that never grow or act at random."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from esper.config import ConfigError, TrainingConfig
from esper.core.action import HEADS, RELEVANT, ActionSpec, Op, integers_of
from esper.core.arrays import Bools, Float32s, Floats, Ints
from esper.core.observation import ObservationLayout
from esper.core.stage import STAGES, SeedStage
from esper.errors import did_you_mean

Masks = Mapping[str, Bools]


class Controller(Protocol):
    """Acts for E envs: a rule, a trained policy or an agent that learns.

    It sees only what the Gymnasium interface passes. It may have an attribute ``log_prob``, which events report: the
    log-probabilities [E] of the actions that it has just returned.
    """

    episode: Ints
    """[E]: number of the episode that each env plays."""

    def begin(self) -> None:
        """Starts a new episode in every env."""

    def act(self, observation: Float32s, masks: Masks) -> Ints:
        """Returns actions int64 [E, 8] for observations [E, size] under ``info["action_mask"]``."""

    def memory_state(self) -> dict[str, Any]:
        """Returns a copy of the state in the running episodes, as tensors and plain values."""

    def load_memory_state(self, state: Mapping[str, Any]) -> None:
        """Continues the episodes in which ``state`` was taken."""


def log_prob_of(controller: Controller, n_envs: int) -> Floats | None:
    """Returns the log-probabilities [E] of the actions that ``controller`` has just returned; None if it has none.

    Raises ConfigError for another shape.
    """
    log_prob = getattr(controller, "log_prob", None)
    if log_prob is None:
        return None
    values = np.asarray(log_prob, dtype=np.float64)
    if values.shape != (n_envs,):
        name = type(controller).__name__
        raise ConfigError(f"log_prob of {name} has shape {list(values.shape)}; expected [{n_envs}], one number per env")
    return values


class PerEnvController(ABC):
    """Base class of controllers that choose for one env at a time and do not learn."""

    EPISODE_STATE: tuple[str, ...] = ()
    """Names of the attributes that hold its state in running episodes: lists of plain values, one per env."""

    def __init__(
        self,
        spec: ActionSpec,
        layout: ObservationLayout,
        n_envs: int,
        run_seed: int = 0,
        config: TrainingConfig | None = None,
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.n_envs = n_envs
        self.run_seed = run_seed
        self.config = config or TrainingConfig()
        self.episode = np.full(n_envs, -1)
        self.steps = np.zeros(n_envs, dtype=np.int64)
        self.prepare()

    def prepare(self) -> None:  # noqa: B027  most controllers have no settings
        """Reads settings from ``config`` and makes the state of E envs; called once, last of all."""

    def begin(self, mask: Bools | None = None) -> None:
        """Starts new episodes in the envs of ``mask`` bool [E]; None for all."""
        for env in range(self.n_envs):
            if mask is None or mask[env]:
                self.episode[env] += 1
                self.steps[env] = 0
                self.begin_episode(env)

    def act(self, observation: Float32s, masks: Masks) -> Ints:
        actions = np.zeros((self.n_envs, len(HEADS)), dtype=np.int64)
        for env in range(self.n_envs):
            masks_of_env = {name: mask[env] for name, mask in masks.items()}
            view = EnvView(self.spec, self.layout, observation[env], masks_of_env)
            if not view.edited or self.acts_again(env, view):
                action = integers_of(self.choose(env, view))
                shape = actions[env].shape
                if action.shape != shape:
                    raise ValueError(f"choose() returned an action of shape {action.shape}, expected {shape}")
                actions[env] = action  # else WAIT
            self.steps[env] += 1
        return actions

    def memory_state(self) -> dict[str, Any]:
        return {
            "episode": self.episode.tolist(),
            "steps": self.steps.tolist(),
            "own": {name: copy.deepcopy(getattr(self, name)) for name in self.EPISODE_STATE},
        }

    def load_memory_state(self, state: Mapping[str, Any]) -> None:
        self.episode[:] = state["episode"]
        self.steps[:] = state["steps"]
        for name in self.EPISODE_STATE:
            setattr(self, name, copy.deepcopy(state["own"][name]))

    def begin_episode(self, env: int) -> None:  # noqa: B027  most controllers have no state
        """Resets the controller's state for this env."""

    def acts_again(self, env: int, view: EnvView) -> bool:
        """Returns whether to choose again after an action, before the epoch is trained: by default, only after a seed
        was planted that is a part of its host at once, since such seeds need not wait for one another."""
        return view.joined

    @abstractmethod
    def choose(self, env: int, view: EnvView) -> Ints:
        """Returns the action int64 [8] of one env."""


@dataclass(frozen=True)
class EnvView:
    """One env's observation and mask, read by name."""

    spec: ActionSpec
    layout: ObservationLayout
    observation: Float32s
    masks: Masks

    def value(self, name: str) -> float:
        """Returns an entry of the host. Raises ValueError for a name that the observation does not have."""
        return float(self.observation[self._place(name)])

    def _place(self, name: str) -> int:
        index = self.layout.index
        if name not in index:
            similar = did_you_mean(name, index)
            raise ValueError(f"no observation {name!r}{similar}; `esper info --observation` lists all of a task")
        return index[name]

    def slot(self, slot: str, name: str) -> float:
        """Returns an entry of a slot and its seed. Raises ValueError as :meth:`value` does."""
        return self.value(f"{slot}/{name}")

    @property
    def horizon(self) -> int:
        """Number of epochs of the episode, which may differ between envs."""
        return round(2 ** (10 * self.value("epochs")))

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return round(self.value("epoch") * self.horizon)

    @property
    def epochs_left(self) -> int:
        """Number of epochs that are left."""
        # The entry is a symlog, which of a number that is not negative is log1p.
        return round(math.expm1(self.value("epochs_left")))

    @property
    def edited(self) -> bool:
        """True if an action was taken since the last epoch was trained."""
        return self.value("edits_left") < 1

    @property
    def joined(self) -> bool:
        """True if the last action planted a seed that is a part of its host at once."""
        planted = self.value("last_op_germinate")
        succeeded = self.value("last_op_succeeded")
        if not planted or not succeeded:
            return False
        # Any other seed is in GERMINATED before its first epoch.
        stages = [self.stage(slot) for slot in self.spec.slots if self.age(slot) == 0]
        return SeedStage.GERMINATED not in stages

    def choice(
        self,
        slot: str,
        blueprint: str,
        name: str,
    ) -> float:
        """Returns an entry of a seed that could be planted. Raises ValueError as :meth:`value` does."""
        return self.value(f"{slot}/{blueprint}/{name}")

    def epochs_in_stage(self, slot: str) -> int:
        return round(self.slot(slot, "epochs_in_stage") * self.horizon)

    def age(self, slot: str) -> int:
        """Epochs since the slot's seed germinated."""
        return round(self.slot(slot, "age") * self.horizon)

    def stage(self, slot: str) -> SeedStage:
        # One of these entries is 1, and the others are 0.
        first = self._place(f"{slot}/stage_{STAGES[0].name.lower()}")
        of_stages = self.observation[first : first + len(STAGES)]
        return STAGES[int(of_stages.argmax())]

    def blueprint(self, slot: str) -> str | None:
        index = round(self.slot(slot, "blueprint"))
        if index == 0:
            return None
        return self.spec.blueprints[index - 1]

    def legal(
        self,
        op: Op,
        slot: str,
        blueprint: str | None = None,
    ) -> bool:
        """True if an op is legal in a slot, for GERMINATE with ``blueprint`` unless it is None.

        Raises ValueError for an unknown slot or blueprint, with the known ones.
        """
        s = self.spec.index("slot", slot)
        if not self.masks["op_slot"][op, s]:
            return False
        if blueprint is None:
            return True
        b = self.spec.index("blueprint", blueprint)
        return bool(self.masks["slot_blueprint"][s, b])


class NoGrowth(PerEnvController):
    """Always WAITs, so that the host trains without growing."""

    def choose(self, env: int, view: EnvView) -> Ints:
        return self.spec.encode(Op.WAIT)


class RandomController(PerEnvController):
    """Acts at random, keyed by (run seed, env, episode, step), so that envs' draws are independent of one another.

    It uses as many decisions before an epoch as it draws.
    """

    def acts_again(self, env: int, view: EnvView) -> bool:
        return True

    def choose(self, env: int, view: EnvView) -> Ints:
        key = [
            self.run_seed,
            env,
            int(self.episode[env]),
            int(self.steps[env]),
        ]
        draw = np.random.default_rng(key)
        op = Op(draw.choice(np.flatnonzero(view.masks["op"])))

        # Heads are drawn in their order: which blueprints are legal depends on the slot.
        action = np.zeros(len(HEADS), dtype=np.int64)
        action[0] = op
        for head in RELEVANT[op]:
            if head == "slot":
                legal = view.masks["op_slot"][op]
            elif head == "blueprint":
                legal = view.masks["slot_blueprint"][action[1]]
            else:
                legal = view.masks[head]
            action[HEADS.index(head)] = draw.choice(np.flatnonzero(legal))
        return action
