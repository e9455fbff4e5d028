"""The base of all vector envs of this package: spaces, masks, rewards, observations and the info dict.

A subclass keeps the state, applies actions and advances time; this class computes what a controller sees from a fleet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from torch import Tensor

from esper.config_resolved import ResolvedConfig
from esper.env.baseline import Baseline
from esper.env.fleet import Bools, Fleet, Floats, Rules, reward_state
from esper.env.info import final_entries
from esper.env.legal import legal_actions
from esper.env.observe import observe
from esper.rewards.modes import Reward
from esper.rewards.terms import Transition
from esper.spaces.action import HEADS, ActionSpec, Op
from esper.spaces.mask import ActionMask
from esper.spaces.observation import LIMIT, ObservationLayout
from esper.telemetry.span import Spans
from esper.training.execution.tiers import Tier
from esper.training.placement import HostCopy

Float32s = NDArray[np.float32]
Actions = NDArray[np.int64]
StepResult = tuple[Float32s, Floats, Bools, Bools, dict[str, Any]]

_COUNTERS = ("illegal_actions", "done", "truncated", "episode_numbers")

AUTORESET_MODES = (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)


def accepted_mode(mode: AutoresetMode | str) -> AutoresetMode:
    """Returns the autoreset mode, given as such or by its value. Raises ValueError listing the supported modes."""
    known = {mode.value: mode for mode in AUTORESET_MODES}
    value = mode.value if isinstance(mode, AutoresetMode) else mode
    if value not in known:
        wanted = " or ".join(f"AutoresetMode.{mode.name} ({mode.value!r})" for mode in AUTORESET_MODES)
        raise ValueError(f"autoreset_mode must be {wanted}, not {mode!r}")
    return known[value]


@dataclass(frozen=True)
class Grown:
    """Growth of each env in its episode so far, [E]."""

    parameters: Floats
    """Number of parameters of the committed network: host and fossils."""
    fossils: Floats
    epochs: Floats
    rollbacks: Floats


def copied(values: NDArray[Any]) -> Tensor:
    """Copies an array to a tensor, which can be loaded from a file without running code."""
    return torch.from_numpy(np.array(values))


class SlotVectorEnv(VectorEnv[Float32s, Actions, NDArray[Any]], ABC):
    """Envs with slots behind the Gymnasium vector API.

    The autoreset mode, in ``metadata["autoreset_mode"]``, sets what happens when an env's episode ends:

    - DISABLED (default): the env idles (its action is ignored, its reward is 0, its flags do not change,
      ``info["idle"]`` is True) until ``reset(options={"reset_mask": mask})`` with a bool mask [E] restarts it.
    - SAME_STEP: the next episode starts in the same step. The returned observation and info, including the masks, are
      those of the new episode; those at the end of the old one are in ``info["final_obs"]`` and ``info["final_info"]``
      (see ``esper.env.info.final_entries``).

    Observations are float32 [E, layout.size]; actions int64 [E, 8] in the order of ``esper.spaces.action.HEADS``;
    ``info["action_mask"]`` marks the legal ones. An illegal action is executed as WAIT and counted in
    ``info["illegal_actions"]``.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": []}  # noqa: RUF012  Gymnasium's declaration

    def __init__(
        self, config: ResolvedConfig, spec: ActionSpec, autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED
    ) -> None:
        self.metadata = {**self.metadata, "autoreset_mode": accepted_mode(autoreset_mode)}
        self.config = config
        self.num_envs = config.env.n_envs
        self.horizon = config.env.episode_length
        self.action_spec = spec
        self.layout = ObservationLayout(spec.slots, self.horizon)
        self.single_observation_space = gymnasium.spaces.Box(-LIMIT, LIMIT, (self.layout.size,), np.float32)
        self.single_action_space = gymnasium.spaces.MultiDiscrete(np.array(spec.sizes))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.run_seed = config.run.seed
        self.illegal_actions = np.zeros(self.num_envs, dtype=np.int64)
        self.baseline: Baseline | None = None
        """The no-growth curves; measured at the first reset if they are not set before."""
        self.rules: Rules | None = None
        """Set from the first reset on."""
        self.reward = Reward(config.reward, config.durations.dwell, self.num_envs)
        self.reward_terms = {name: np.zeros(self.num_envs) for name in self.reward.names}
        self.done = np.ones(self.num_envs, dtype=np.bool_)
        self.truncated = np.zeros(self.num_envs, dtype=np.bool_)
        self.episode_numbers = np.full(self.num_envs, -1)
        """Number of the current episode of each env, int64 [E]: 0 for the first under the run seed, -1 before it."""
        self.tier: Tier | None = None
        """Execution tier of training steps; None for simulated hosts."""
        self.pinned: tuple[HostCopy, ...] = ()
        """Copies of hosts that lie in pinned CPU memory, so that a limit on GPU memory holds."""
        self.spans = Spans(marks=config.run.mark_phases)
        """Times the phases of steps, and other parts of the run that the env's owner assigns to a phase."""

    @property
    def phase_seconds(self) -> dict[str, float]:
        """A copy of the wall time in seconds by phase (``esper.telemetry.span.PHASES``) since the env was made."""
        return dict(self.spans.seconds)

    def copies_held(self) -> list[Counter[str]]:
        """Bytes of the copies that are kept of each host, by where they lie: ``cpu``, ``cuda:0``, ... or ``pinned``."""
        return []

    def prepare(self) -> None:
        """Prepares the first reset, such as by measuring the baseline; optional, since the reset does it if needed."""

    @property
    @abstractmethod
    def host_parameters(self) -> int:
        """Number of parameters of the host without seeds."""

    @abstractmethod
    def test_accuracy(self) -> Floats:
        """Returns the test accuracy of each committed network (fossils only), pp [E].

        No reward, gate or governor uses the test data.
        """

    def grown(self) -> Grown:
        """Returns the growth of each env so far."""
        assert self.rules is not None
        slots = self.fleet.slots
        fossil_parameters = np.where(slots.fossil, slots.parameters, 0).sum(axis=1)
        return Grown(
            parameters=self.rules.host_parameters + fossil_parameters.astype(np.float64),
            fossils=slots.fossil.sum(axis=1).astype(np.float64),
            epochs=self.fleet.epoch.astype(np.float64),
            rollbacks=self.fleet.rollbacks.astype(np.float64),
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state needed to resume between two steps.

        It consists of nested dicts and lists of copied CPU tensors and plain values.
        """
        return {
            "run_seed": self.run_seed,
            "potentials": {name: copied(values) for name, values in self.reward.stored.items()},
            "terms": {name: copied(values) for name, values in self.reward_terms.items()},
            **{name: copied(getattr(self, name)) for name in _COUNTERS},
            "hosts": self._hosts_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Float32s, dict[str, Any]]:
        """Resumes from ``state`` and returns the observation and info at that point.

        Run-constant inputs are not saved: config, task, baseline and blueprints must be the same.
        """
        self.prepare()
        self.run_seed = state["run_seed"]
        for stored, saved in ((self.reward.stored, state["potentials"]), (self.reward_terms, state["terms"])):
            for name, values in saved.items():
                stored[name] = values.numpy().copy()
        for name in _COUNTERS:
            getattr(self, name)[:] = state[name].numpy()
        return self._show(self._load_hosts(state["hosts"])), self._info()

    @abstractmethod
    def _hosts_state(self) -> Any:
        """Returns the hosts' part of the state."""

    @abstractmethod
    def _load_hosts(self, state: Any) -> Fleet:
        """Loads the hosts' part of the state."""

    @abstractmethod
    def _step(self, actions: Actions) -> StepResult:
        """Runs one epoch of every env with an unfinished episode, without autoreset."""

    def step(self, actions: Actions) -> StepResult:
        """Executes ``actions`` int64 [E, 8] and trains every host for one epoch; rewards float64 [E], flags bool [E].

        Raises ResetNeeded before the first reset, and ValueError for actions of another shape or out of range.
        """
        observation, rewards, terminated, truncated, info = self._step(actions)
        ended = terminated | truncated
        if self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP and ended.any():
            final = final_entries(observation, info, ended)
            observation, info = self.reset(options={"reset_mask": ended})
            info |= final
        return observation, rewards, terminated, truncated, info

    def action_masks(self) -> Bools:
        """Returns the concatenated masks of the heads, bool [E, sum of head sizes], as sb3-contrib reads them."""
        masks = self.mask.heads(self.action_spec)
        return np.concatenate([masks[head] for head in HEADS], axis=1)

    def _begin(self, seed: int | list[int | None] | None, options: dict[str, Any] | None, everyone: bool) -> Bools:
        """Resets the counters of the envs whose episodes start now and returns these envs, bool [E].

        Raises ValueError for a reset mask of another dtype or shape, and for a list of seeds: envs derive their seeds
        from the run seed.
        """
        if isinstance(seed, list):
            name = type(self).__name__
            raise ValueError(f"{name} takes one run seed, from which each env derives its own; pass an int")
        starting = np.ones(self.num_envs, dtype=np.bool_)
        if options and "reset_mask" in options:
            mask = np.asarray(options["reset_mask"])
            if mask.shape != (self.num_envs,) or mask.dtype != np.bool_:
                given = f"{mask.dtype} {list(mask.shape)}"
                raise ValueError(f"options['reset_mask'] must be a bool array [{self.num_envs}], not {given}")
            starting = starting if everyone else mask
        if seed is not None:
            super().reset(seed=int(seed))  # Gymnasium's own generator, which is not used here
            self.run_seed = seed
            self.episode_numbers[:] = -1
        self.episode_numbers[starting] += 1
        self.illegal_actions[starting] = 0
        self.done[starting] = self.truncated[starting] = False
        self.reward.reset(starting)
        for term in self.reward_terms.values():
            term[starting] = 0.0
        return starting

    def _accepted(self, actions: Actions) -> Actions:
        """Returns the actions to execute: WAIT for idle envs, and for illegal actions, which are counted.

        Raises ResetNeeded before the first reset, and ValueError for actions of another shape or out of range.
        """
        if self.rules is None:
            raise gymnasium.error.ResetNeeded("call reset() before step()")
        actions = np.asarray(actions, dtype=np.int64)
        if actions.shape != (self.num_envs, len(HEADS)):
            raise ValueError(f"actions have shape {actions.shape}, expected {(self.num_envs, len(HEADS))}")
        for head, size, column in zip(HEADS, self.action_spec.sizes, actions.T, strict=True):
            if column.min() < 0 or column.max() >= size:
                raise ValueError(f"{head} must be one of 0 to {size - 1}, not {column.tolist()}")
        legal = self.mask.legal(np.arange(self.num_envs), actions)
        self.illegal_actions += ~legal & ~self.done
        return np.where((legal & ~self.done)[:, None], actions, Op.WAIT)

    def _show(self, fleet: Fleet) -> Float32s:
        """Sets the fleet that controllers see, with its masks, and returns the observations [E, size]."""
        assert self.rules is not None
        self.fleet = fleet
        fleet.potential = self.reward.potential + np.zeros(self.num_envs)
        self.mask: ActionMask = legal_actions(fleet, self.rules)
        self._state = reward_state(fleet, self.rules)
        return observe(fleet, self.rules, self.layout)

    def _pay(self, fleet: Fleet, active: Bools) -> Floats:
        """Returns the rewards [E] of the step from the last shown state to ``fleet``; ``self.done`` must be set."""
        assert self.rules is not None
        transition = Transition(
            before=self._state,
            after=reward_state(fleet, self.rules),
            op=fleet.last_op,
            succeeded=fleet.succeeded,
            rolled_back=fleet.rolled_back,
            terminated=self.done & ~self.truncated,
            horizon=self.horizon,
            host_parameters=self.rules.host_parameters,
            budget=self.rules.budget,
        )
        self.reward_terms = self.reward.pay(transition, active)
        return np.asarray(np.sum(list(self.reward_terms.values()), axis=0))

    def _info(self) -> dict[str, Any]:
        assert self.rules is not None
        return {
            # Copies, because the env itself uses these tables.
            "action_mask": {name: mask.copy() for name, mask in self.mask.heads(self.action_spec).items()},
            "reward_terms": {name: term.copy() for name, term in self.reward_terms.items()},
            "illegal_actions": self.illegal_actions.copy(),
            "idle": self.done.copy(),
            "validation_accuracy": self.fleet.accuracy.copy(),
            "committed_accuracy": self.fleet.committed.copy(),
            "baseline_accuracy": self.rules.baseline_at(self.fleet.epoch),
        }
