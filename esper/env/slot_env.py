"""The base of all vector envs of this package: spaces, masks, rewards, observations and the info dict.

Time advances in an :class:`esper.env.epoch_loop.EpochLoop`; this class computes what a controller sees of its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from esper.config import ConfigError
from esper.config.resolved import ResolvedConfig
from esper.core.action import HEADS, ActionSpec, Op, integers_of
from esper.core.arrays import Float32s
from esper.core.legal import legal_actions
from esper.core.mask import ActionMask
from esper.core.observation import LIMIT, ObservationLayout
from esper.core.observe import observe
from esper.core.reward_modes import Reward
from esper.core.reward_terms import Transition
from esper.core.slots import Bools, Floats, Ints
from esper.core.state import OF_HOSTS, Baseline, Choices, EpisodeRules, Setting, copied, reward_state
from esper.env.backend import Backend, follow_layers, merge_kept
from esper.env.epoch_loop import Actions, EpochLoop
from esper.ops.torch_state import training_state
from esper.telemetry.event import Event
from esper.telemetry.span import Spans
from esper.training.rng import accepted_seed

if TYPE_CHECKING:
    from esper.training.executor import Execution

Info = dict[str, Any]
"""The info dict of a vector env: arrays [E, ...], and dicts of these."""

SETTLED = ("style", "tempo", "alpha_target")
"""Heads that say how a seed is incubated and blended, which one that is a part of its host at once is not."""
AUTORESET_MODES = (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)


def accepted_mode(mode: AutoresetMode | str) -> AutoresetMode:
    """Returns the autoreset mode, given as such or by its value. Raises ValueError listing the supported modes."""
    for known in AUTORESET_MODES:
        if mode in (known, known.value):
            return known
    names = [f"AutoresetMode.{known.name} ({known.value!r})" for known in AUTORESET_MODES]
    raise ValueError(f"autoreset_mode must be {' or '.join(names)}, not {mode!r}")


def reset_mask(options: dict[str, Any] | None, n_envs: int) -> Bools:
    """Returns the envs to reset, bool [E]: those of ``options["reset_mask"]``, or all. Raises ValueError for others."""
    all_envs = np.ones(n_envs, dtype=np.bool_)
    mask = np.asarray((options or {}).get("reset_mask", all_envs))
    if mask.shape != (n_envs,) or mask.dtype != np.bool_:
        raise ValueError(f"options['reset_mask'] must be a bool array [{n_envs}], not {mask.dtype} {list(mask.shape)}")
    return mask


class SlotVectorEnv(VectorEnv[Float32s, Actions, NDArray[Any]], ABC):
    """Envs with slots behind the Gymnasium vector API.

    The autoreset mode, in ``metadata["autoreset_mode"]``, sets what happens when an env's episode ends:

    - DISABLED (default): the env idles (its action is ignored, its reward is 0, its flags do not change,
      ``info["idle"]`` is True) until ``reset(options={"reset_mask": mask})`` with a bool mask [E] restarts it.
    - SAME_STEP: the next episode starts in the same step. The returned observation and info, including the masks, are
      those of the new episode; those at the end of the old one are in ``info["final_obs"]`` and ``info["final_info"]``.

    Observations are float32 [E, layout.size]; actions int64 [E, 8] in the order of ``esper.core.action.HEADS``;
    ``info["action_mask"]`` marks legal actions; others act as WAIT and are counted in ``info["illegal_actions"]``.

    A step trains an epoch of every env, unless ``env.edits_per_epoch`` is above 1: then ``info["trained"]`` bool [E]
    says which envs it trained. In the others only the action was applied. Their reward is its price, and a learner
    discounts with 1 there.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": []}  # noqa: RUF012  Gymnasium's declaration

    def __init__(
        self,
        config: ResolvedConfig,
        spec: ActionSpec,
        backend: Backend,
        spans: Spans,
        choices: Choices,
        setting: Setting,
        autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED,
        emit: Callable[[Event], None] | None = None,
    ) -> None:
        self.autoreset_mode = accepted_mode(autoreset_mode)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}
        self.config = config
        self.action_spec = spec
        self.backend = backend
        self.spans = spans
        self.choices = checked(choices, config)
        self.offers = choices.of_envs(config.env.n_envs)
        """The sizes of seeds in the hosts of all envs as they are now."""
        self.setting = setting
        self.settled = SETTLED if backend.at_once.all() else ()
        """Heads of actions whose choices all do the same."""
        self.num_envs = config.env.n_envs
        self.horizon = config.env.episode_length
        horizons = [self.horizon] * self.num_envs
        self.loop = EpochLoop(backend, config, horizons, spec, spans, emit)
        self.state = self.loop.state
        self.done = self.state.done
        """True for envs whose episode has ended and not been reset, [E]."""
        self.layout = ObservationLayout(spec.slots, spec.blueprints, self.horizon)
        self.single_observation_space = gymnasium.spaces.Box(-LIMIT, LIMIT, (self.layout.size,), np.float32)
        self.single_action_space = gymnasium.spaces.MultiDiscrete(np.array(spec.sizes))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.run_seed = config.run.seed
        self.illegal_actions = np.zeros(self.num_envs, dtype=np.int64)
        self.first_illegal = ""
        """Where and why the first illegal action was one, since all envs began an episode together."""
        self.baseline: Baseline | None = None
        """The no-growth curves; measured at the first reset if they are not set before."""
        self.rules: EpisodeRules | None = None
        """Set by :meth:`prepare`."""
        self.reward = Reward(config.reward, self.loop.durations.stage_dwell, self.num_envs)
        self.reward_terms = {name: np.zeros(self.num_envs) for name in self.reward.names}
        self.execution: Execution | None = None
        """The execution of training steps; None for hosts that this env does not train."""

    @property
    def host_parameters(self) -> int:
        """Number of parameters of the host without seeds; the mean, if envs have different ones."""
        return int(np.mean(self.choices.host_parameters))

    @property
    def first_parameters(self) -> Ints:
        """The same for each env, [E]."""
        return np.broadcast_to(self.choices.host_parameters, self.num_envs)

    @property
    def phase_seconds(self) -> dict[str, float]:
        """A copy of the wall time in seconds by phase (``esper.telemetry.span.PHASES``) since the env was made."""
        return dict(self.spans.seconds)

    def configure(
        self,
        *,
        baseline: Baseline | None = None,
        run_seed: int | None = None,
        grouped: bool | None = None,
    ) -> None:
        """Sets what a run decides about its envs; None leaves a value as it is.

        Args:
            baseline: the no-growth curves, which are then not measured; to be set before the first reset.
            run_seed: the seed that the next episodes are derived from; they keep their numbers.
            grouped: whether neighbours are alike whose hosts could differ, as ``ppo.group`` says.
        """
        if baseline is not None:
            self.baseline = baseline
        if run_seed is not None:
            self.run_seed = run_seed

    def continue_after(self, episodes: Ints | int) -> None:
        """Makes the next episode of each env the one after ``episodes``, [E] or a number for all."""
        self.state.episode[:] = episodes

    def prepare(self) -> EpisodeRules:
        """Measures the baseline unless it was given; optional, since the first reset does it if needed."""
        if self.rules is None:
            self.baseline = self._no_growth()
            self.rules = EpisodeRules(self.config, self.baseline, self.horizon, self.choices, self.offers, self.setting)
        return self.rules

    @abstractmethod
    def _no_growth(self) -> Baseline:
        """Returns the no-growth curves, for episodes of ``horizon`` epochs."""

    def _report(
        self,
        rules: EpisodeRules,
        envs: list[int],
        rewards: Floats,
    ) -> None:
        """Reports the epoch of these envs, the last step of which was rewarded with ``rewards``."""
        reporter = self.loop.reporter
        if reporter is None:
            return
        for env in envs:
            terms = {name: float(term[env]) for name, term in self.reward_terms.items()}
            with self.spans("telemetry"):
                reporter.epoch_ended(env, terms, float(rewards[env]), rules, self.backend.final_scores)

    def take_hosts(self, starting: Bools) -> None:
        """Takes over the sizes of the hosts that the envs ``starting`` bool [E] are about to get."""
        self.offers.put(starting, self.choices)

    def test_accuracy(self) -> Floats:
        """Returns the test accuracy of each committed network (fossils only), pp [E].

        No reward, gate or governor uses the test data.
        """
        return self.backend.test_accuracy(self.state)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state needed to resume between two steps: dicts and lists of copied tensors and plain values."""
        copies = {}
        for name, arrays in changing_arrays(self).items():
            copies[name] = {key: copied(values) for key, values in arrays.items()}
        return {
            "run_seed": self.run_seed,
            "arrays": copies,
            "hosts": self.backend.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Float32s, Info]:
        """Resumes from ``state`` and returns the observation and info at that point.

        Run-constant inputs are not saved: config, task, baseline and blueprints must be the same.
        """
        rules = self.prepare()
        self.run_seed = state["run_seed"]
        for name, arrays in changing_arrays(self).items():
            saved = state["arrays"][name]
            for key, values in arrays.items():
                values[...] = saved[key].numpy()
        self.backend.load_state_dict(state["hosts"], self.state)
        return self._observe(rules), info_of(self, rules, self.done)

    @training_state()
    def reset(
        self,
        *,
        seed: int | list[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Float32s, Info]:
        """Starts episodes: all, or those of ``options["reset_mask"]`` (bool [E]). ``seed`` sets the run seed.

        Raises ValueError for a reset mask of another dtype or shape, for a seed that is no integer of 0 or more, and
        for a list of seeds: envs derive their own from the run seed. The env is then as before.
        """
        run_seed = accepted_seed(seed)
        starting = reset_mask(options, self.num_envs)
        if self.rules is None:
            starting = np.ones_like(starting)  # the first reset starts all
        if run_seed is not None:
            super().reset(seed=run_seed)  # Gymnasium's own generator, which is not used here
            self.run_seed = run_seed
            self.state.episode[:] = -1
        rules = self.prepare()
        start_episodes(self, starting)
        return self._observe(rules), info_of(self, rules, self.done)

    @training_state()
    def step(self, actions: Actions) -> tuple[Float32s, Floats, Bools, Bools, Info]:
        """Executes ``actions`` int64 [E, 8] and trains the hosts for one epoch that have no edits left or WAIT; rewards
        float64 [E], flags bool [E].

        An episode terminates at its horizon and at its last rollback; one that ``env.stop_on`` ends is truncated.
        Raises ResetNeeded before the first reset, and ValueError for actions of another shape, out of range, or of
        anything but integers.
        """
        rules = self.rules
        if rules is None:
            raise gymnasium.error.ResetNeeded("call reset() before step()")
        actions = accepted_actions(self, actions)
        idle = self.done.copy()
        trained = self.loop.step(actions)
        return self._result(rules, idle, trained)

    def _result(
        self,
        rules: EpisodeRules,
        idle: Bools,
        trained: Bools,
    ) -> tuple[Float32s, Floats, Bools, Bools, Info]:
        """Returns the result of a step in which the envs ``idle`` bool [E] did not take part, and those of ``trained``
        bool [E] trained an epoch."""
        with self.spans("decide"):
            follow_layers(self)
            # The reward starts from the state that _observe() kept, which the next observation replaces.
            rewards = self._pay(rules, ~idle, trained)
            self._report(rules, np.flatnonzero(trained).tolist(), rewards)
            self.state.edit_reward[trained] = 0.0
            merge_kept(self)
            observation = self._observe(rules)

        truncated = self.state.truncated.copy()
        terminated = self.done & ~truncated
        info = info_of(self, rules, idle)
        ended = terminated | truncated
        if self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP and ended.any():
            # Copied before the reset overwrites the state.
            final = final_entries(observation, info, ended)
            observation, info = self.reset(options={"reset_mask": ended})
            info |= final
        return observation, rewards, terminated, truncated, info

    def action_masks(self) -> Bools:
        """Returns the concatenated masks of the heads, bool [E, sum of head sizes], as sb3-contrib reads them."""
        masks = self.mask.heads(self.action_spec, self.settled)
        return np.concatenate([masks[head] for head in HEADS], axis=1)

    def _observe(self, rules: EpisodeRules) -> Float32s:
        """Sets the masks and keeps the state that the next reward starts from; returns the observations [E, size]."""
        state = self.state
        state.potential[:] = self.reward.potential
        self.mask: ActionMask = legal_actions(
            state.slots,
            self.config.env,
            self.loop.durations,
            rules.affordable(state.slots),
            rules.shrinkable(state.slots, state.epoch),
        )
        if self.loop.reporter is not None:
            self.loop.reporter.mask = self.mask
        self._seen = reward_state(state, rules)
        return observe(
            state,
            self._seen,
            rules,
            self.layout,
        )

    def _pay(
        self,
        rules: EpisodeRules,
        active: Bools,
        trained: Bools,
    ) -> Floats:
        """Returns the rewards [E] of the step from the last observed state to the present one, in which the envs of
        ``active`` bool [E] took part."""
        state = self.state
        transition = Transition(
            before=self._seen,
            after=reward_state(state, rules),
            op=state.last_op,
            succeeded=state.succeeded,
            rolled_back=state.rolled_back,
            terminated=state.done & ~state.truncated,
            horizon=rules.horizon,
            budget=rules.budget,
            doubling=rules.doubling,
        )
        self.reward_terms = self.reward.pay(transition, active, trained)
        terms = list(self.reward_terms.values())
        rewards = np.asarray(np.sum(terms, axis=0))
        state.total_reward += np.where(active, rewards, 0.0)
        state.edit_reward += np.where(active & ~trained, rewards, 0.0)
        return rewards

    def close_extras(self, **_kwargs: Any) -> None:
        self.backend.close()


def checked(choices: Choices, config: ResolvedConfig) -> Choices:
    """Returns ``choices``. Raises ConfigError if ``config`` has prices in operations, and those are not known."""
    needed = config.reward.rent_in == "flops" or config.env.flop_budget is not None
    if needed and not choices.host_flops:
        raise ConfigError(
            "the operations of a forward pass of this host are not known, so reward.rent_in must be parameters, and "
            "env.flop_budget must not be set"
        )
    return choices


def start_episodes(env: SlotVectorEnv, starting: Bools) -> None:
    """Starts the next episode of the envs ``starting`` bool [E]."""
    env.illegal_actions[starting] = 0
    if starting.all():
        env.first_illegal = ""
    env.reward.reset(starting)
    for term in env.reward_terms.values():
        term[starting] = 0.0
    env.take_hosts(starting)
    env.loop.start(starting, env.run_seed)


def info_of(env: SlotVectorEnv, rules: EpisodeRules, idle: Bools) -> Info:
    """Returns the info dict of the present state; copies, because the env itself uses these arrays."""
    masks = env.mask.heads(env.action_spec, env.settled)
    return {
        "action_mask": {name: mask.copy() for name, mask in masks.items()},
        "reward_terms": {name: term.copy() for name, term in env.reward_terms.items()},
        "illegal_actions": env.illegal_actions.copy(),
        "idle": idle.copy(),
        "trained": env.state.trained.copy(),
        "validation_accuracy": env.state.accuracy.copy(),
        "committed_accuracy": env.state.committed.copy(),
        "baseline_accuracy": rules.baseline_at(env.state.epoch),
    }


def final_entries(
    observation: Float32s,
    info: Info,
    ended: Bools,
) -> Info:
    """Returns the info entries that Gymnasium's vector envs add in a step in which ``ended`` (bool [E]) episodes reset.

    ``final_obs`` is an object array [E] of observations, None for episodes that continue. ``final_info`` is ``info`` of
    the ended episodes, zero elsewhere; it and every dict in it have a bool array ``_key`` for each key, which marks the
    envs whose values are valid.
    """
    last = np.full(len(ended), None, dtype=object)
    for env in np.flatnonzero(ended):
        last[env] = observation[env].copy()
    return {
        "final_obs": last,
        "_final_obs": ended.copy(),
        "final_info": _where(ended, info),
        "_final_info": ended.copy(),
    }


def _where(ended: Bools, info: Info) -> Info:
    part: Info = {}
    for key, value in info.items():
        if isinstance(value, dict):
            part[key] = _where(ended, value)
        else:
            final = np.zeros_like(value)
            final[ended] = value[ended]
            part[key] = final
        part[f"_{key}"] = ended.copy()
    return part


def accepted_actions(env: SlotVectorEnv, actions: Any) -> Actions:
    """Returns the actions to execute: WAIT for idle envs, and for illegal actions, which are counted.

    Raises ValueError for actions of another shape, out of range, or of anything but integers.
    """
    actions = integers_of(actions)
    shape = (env.num_envs, len(HEADS))
    if actions.shape != shape:
        raise ValueError(f"actions have shape {actions.shape}, expected {shape}")
    for head, size, column in zip(HEADS, env.action_spec.sizes, actions.T, strict=True):
        if column.min() < 0 or column.max() >= size:
            raise ValueError(f"{head} must be one of 0 to {size - 1}, not {column.tolist()}")
    legal = env.mask.legal(np.arange(env.num_envs), actions)
    active = ~env.done
    illegal = active & ~legal
    env.illegal_actions += illegal
    if illegal.any() and not env.first_illegal:
        first = int(illegal.argmax())
        reason = env.mask.why_illegal(env.action_spec, first, actions[first])
        env.first_illegal = f"{reason} (host {first}, epoch {env.state.epoch[first]})"
    executed = active & legal
    return np.where(executed[:, None], actions, Op.WAIT)


def changing_arrays(env: SlotVectorEnv) -> dict[str, dict[str, NDArray[Any]]]:
    """Returns all arrays that change from step to step, themselves."""
    return {
        "envs": env.state.arrays(),
        "slots": env.state.slots.arrays(),
        "loop": {
            "best_by_epoch": env.loop.best_by_epoch,
            "illegal_actions": env.illegal_actions,
        },
        "offers": {name: getattr(env.offers, name) for name in OF_HOSTS},
        "potentials": env.reward.stored,
        "reward_terms": env.reward_terms,
    }
