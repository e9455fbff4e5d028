"""Events of hosts in training: actions, gates, stages, epochs and episodes, in the order in which they happen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from esper.config import TrainingConfig
from esper.core.action import ActionSpec, Op
from esper.core.gates import GATES, GateResult, Gates, Place, germination_gate
from esper.core.mask import ActionMask
from esper.core.reward_modes import PRICES
from esper.core.slots import Bools, Floats, Ints, Slots
from esper.core.stage import SeedStage
from esper.core.state import EnvState, EpisodeRules
from esper.env.backend import FinalScores, Release, Rollbacks
from esper.telemetry.event import (
    ActionTaken,
    EpisodeCompleted,
    EpochCompleted,
    Event,
    GateEvaluated,
    GovernorRollback,
    SeedCut,
    StageChanged,
)
from esper.training.metrics import HOST

if TYPE_CHECKING:
    from esper.env.slot_env import SlotVectorEnv

GRADIENTS = {
    "norm": "gradient_norm",
    "health": "gradient_health",
    "vanishing": "vanishing",
    "exploding": "exploding",
}
"""Statistics of gradients in events, and their fields in the states of envs and of slots."""


class Reporter:
    """Passes the events of E hosts to ``emit``; stage changes of an epoch's end are kept until its report."""

    def __init__(
        self,
        emit: Callable[[Event], None],
        spec: ActionSpec,
        config: TrainingConfig,
        state: EnvState,
    ) -> None:
        self.emit = emit
        self.spec = spec
        self.config = config
        self.state = state
        self._pending: list[list[StageChanged]] = [[] for _ in state.done]
        self.mask: ActionMask | None = None
        """Legal actions of the next step; None if unknown."""
        self.log_prob: Floats | None = None
        """Log-probabilities [E] of the next actions; None if unknown."""
        self.look()

    def look(self) -> None:
        """Remembers the stages and blueprints of all slots, to tell what changes from now on."""
        self._stages = self.state.slots.stage.copy()
        self._blueprints = self.state.slots.blueprint.copy()

    def expect(self, log_prob: Floats | None) -> None:
        """Takes the log-probabilities [E] of the next actions, None if they are unknown; a step clears them."""
        self.log_prob = log_prob

    def explain(
        self,
        gates: Gates,
        actions: Ints,
        active: Bools,
    ) -> dict[int, GateResult]:
        """Returns the gate of each env's action, before anything has changed."""
        self.look()
        slots = self.state.slots
        results = {}
        for env in np.flatnonzero(active).tolist():
            op = int(actions[env, 0])
            slot = int(actions[env, 1])
            if op == Op.GERMINATE:
                empty = bool(slots.stage[env, slot] == SeedStage.DORMANT)
                seeds_left = self.config.env.max_seeds - int(slots.living[env].sum())
                results[env] = germination_gate(True, empty, seeds_left)
            elif op in (Op.ADVANCE, Op.FOSSILIZE):
                results[env] = gates.explain((env, slot))
        return results

    def acted(
        self,
        actions: Ints,
        active: Bools,
        gates: Mapping[int, GateResult],
        failures: Mapping[int, str],
        released: Mapping[int, Release],
    ) -> None:
        """Reports each env's gate, action and stage changes; ``failures`` are reasons why seeds were not planted, and
        ``released`` the units that were taken out of layers."""
        told = active & ((actions[:, 0] != Op.WAIT) | self.config.telemetry.debug)
        for env in np.flatnonzero(told).tolist():
            action = actions[env]
            reason = failures.get(env, "")
            if env in gates:
                self.opened([((env, int(action[1])), gates[env])])
                reason = gates[env].reason or reason
            self._action(env, action, reason)
            if env in released:
                changes = self._changes(env, "shrink", blueprint=released[env].blueprint)
            else:
                changes = self._changes(env, Op(int(action[0])).name.lower())
            for change in changes:
                self.emit(change)
        self.log_prob = None
        self.look()

    def _action(
        self,
        env: int,
        action: Ints,
        reason: str,
    ) -> None:
        """Reports the action [8] of an env; ``reason`` says why it was refused, and is empty if it was not."""
        heads = {"slot": None, "blueprint": None, **self.spec.decode(action)}  # most ops have none
        masked = None
        if self.mask is not None:
            masked = self.mask.illegal(self.spec, env, action)
        log_prob = None
        if self.log_prob is not None:
            log_prob = float(self.log_prob[env])
        self.emit(
            ActionTaken(
                **self._when(env),
                **heads,
                accepted=not reason,
                reason=reason,
                masked=masked,
                log_prob=log_prob,
            )
        )

    def opened(self, gates: Iterable[tuple[Place, GateResult]]) -> None:
        """Reports gates, by env and slot."""
        for (env, s), gate in gates:
            self.emit(
                GateEvaluated(
                    **self._when(env),
                    slot=self.spec.slots[s],
                    gate=gate.gate,
                    passed=gate.passed,
                    score=gate.score,
                    checks=gate.checks,
                )
            )

    def changed(self, cause: str, if_removed: str) -> None:
        """Keeps the stage changes since the last report; ``if_removed`` is the cause of removals."""
        for env, pending in enumerate(self._pending):
            pending += self._changes(env, cause, if_removed)
        self.look()

    def merged(self) -> None:
        """Reports the slots whose fossils have become a part of their hosts' layers."""
        for env in range(len(self._pending)):
            for change in self._changes(env, "merged"):
                self.emit(change)
        self.look()

    def governed(self, rollbacks: Rollbacks) -> None:
        """Reports rollbacks, by env, and the seeds that were cut in other envs; keeps the stage changes."""
        gone = (self._blueprints >= 0) & ~self.state.slots.occupied
        for env, pending in enumerate(self._pending):
            when = self._when(env)
            if env in rollbacks:
                cause = "rollback"
                panic, epoch = rollbacks[env]
                rollback = GovernorRollback(
                    **when,
                    **asdict(panic),
                    restored_epoch=epoch,
                    rollbacks=int(self.state.rollbacks[env]),
                )
                self.emit(rollback)
            else:
                cause = "not finite"
                for s in np.flatnonzero(gone[env]).tolist():
                    blueprint = self.spec.blueprints[self._blueprints[env, s]]
                    self.emit(SeedCut(**when, slot=self.spec.slots[s], blueprint=blueprint))
            pending += self._changes(env, cause)
        self.look()

    def epoch_ended(
        self,
        env: int,
        terms: dict[str, float],
        reward: float,
        rules: EpisodeRules,
        scores: Callable[[int], FinalScores],
    ) -> None:
        """Reports kept stage changes, the epoch, and an ended episode, with its final ``scores``.

        ``terms`` and ``reward`` are those of the step that trained the epoch. The edits before it are added.
        """
        edits = float(self.state.edit_reward[env])
        if edits:
            terms[next(name for name in terms if name in PRICES)] += edits
            reward += edits
        for change in self._pending[env]:
            self.emit(change)
        self._pending[env].clear()
        self._epoch(env, terms, reward, rules)
        if self.state.done[env]:
            self._episode(env, rules, scores(env))

    def _epoch(
        self,
        env: int,
        terms: dict[str, float],
        reward: float,
        rules: EpisodeRules,
    ) -> None:
        state = self.state
        slots = state.slots
        alpha = slots.alpha_on[env]
        contributions = {}
        errors = {}
        stages = {}
        for s, name in enumerate(self.spec.slots):
            stages[name] = SeedStage(slots.stage[env, s]).name
            contribution = float(slots.contribution[env, s])
            error = float(slots.contribution_error[env, s])
            if alpha[s] > 0 and not math.isnan(contribution):
                contributions[name] = contribution
                if not math.isnan(error):
                    errors[name] = error
        self.emit(
            EpochCompleted(
                **self._when(env),
                **self._scores(env, rules),
                train_loss=float(state.train_loss[env]),
                train_accuracy=float(state.train_accuracy[env]),
                validation_loss=float(state.loss[env]),
                parameters=int(_of(rules.choices.host_parameters, env)) + int(slots.added_parameters[env]),
                contributions=contributions,
                contribution_errors=errors,
                needs=needs_of(slots, env, self.spec.slots),
                gradients=gradients_of(state, env, self.spec.slots),
                stages=stages,
                merges=merges_of(slots, env, self.spec.slots),
                widths=widths_of(rules, env, self.spec.slots),
                reward=reward,
                reward_terms=terms,
            )
        )

    def _episode(
        self,
        env: int,
        rules: EpisodeRules,
        scores: FinalScores,
    ) -> None:
        state = self.state
        slots = state.slots
        kept = np.flatnonzero(slots.fossil[env]).tolist()
        fossils = {}
        for s in kept:
            fossils[self.spec.slots[s]] = self.spec.blueprints[slots.blueprint[env, s]]

        # Of both in one epoch, divergence is named.
        stopped = None
        if state.truncated[env]:
            diverged = "divergence" in self.config.env.stop_on and state.rolled_back[env]
            stopped = "divergence" if diverged else "plateau"
        self.emit(
            EpisodeCompleted(
                **self._scores(env, rules),
                env=env,
                episode=int(state.episode[env]),
                epochs=int(state.epoch[env]),
                total_reward=float(state.total_reward[env]),
                host_parameters=int(_of(rules.choices.host_parameters, env)),
                host_flops=float(_of(rules.choices.host_flops, env)),
                fossil_flops=float(rules.fossil_flops(slots)[env]),
                fossils=fossils,
                merges=merges_of(slots, env, self.spec.slots),
                rollbacks=int(state.rollbacks[env]),
                terminated=not state.truncated[env],
                stopped=stopped,
                shapley={slot: (value.difference, value.error) for slot, value in scores.shapley.items()},
                class_accuracy=scores.by_class,
            )
        )

    def _changes(
        self,
        env: int,
        cause: str,
        if_removed: str | None = None,
        blueprint: int = -1,
    ) -> list[StageChanged]:
        """Returns the stage changes of one env; ``if_removed`` replaces the cause of a removal, and ``blueprint`` is
        that of a seed that was there in between."""
        changes = []
        slots = self.state.slots
        cause_of_removal = if_removed or cause
        for s in np.flatnonzero(self._stages[env] != slots.stage[env]).tolist():
            # A slot without a seed has the blueprint -1.
            index = max(self._blueprints[env, s], slots.blueprint[env, s], blueprint)
            name = self.spec.blueprints[index] if index >= 0 else None
            after = SeedStage(slots.stage[env, s])
            change = StageChanged(
                **self._when(env),
                slot=self.spec.slots[s],
                blueprint=name,
                before=SeedStage(self._stages[env, s]).name,
                after=after.name,
                cause=cause_of_removal if after is SeedStage.PRUNED else cause,
            )
            changes.append(change)
        return changes

    def _when(self, env: int) -> dict[str, Any]:
        """Returns the fields that tell when an event happened, and in which env."""
        return {
            "env": env,
            "episode": int(self.state.episode[env]),
            "epoch": int(self.state.epoch[env]),
        }

    def _scores(self, env: int, rules: EpisodeRules) -> dict[str, Any]:
        """Returns the fields that the ends of an epoch and of an episode share."""
        state = self.state
        return {
            "validation_accuracy": float(state.accuracy[env]),
            "committed_accuracy": float(state.committed[env]),
            "baseline_accuracy": rules.baseline.accuracy[int(state.epoch[env])],
            "fossil_parameters": int(state.slots.fossil_parameters[env]),
        }


def merges_of(
    slots: Slots,
    env: int,
    names: Sequence[str],
) -> dict[str, int]:
    """Returns the number of seeds in the layers of an env's slots, where there are some."""
    merges = dict(zip(names, slots.merges[env].tolist(), strict=True))
    return {slot: count for slot, count in merges.items() if count}


def widths_of(
    rules: EpisodeRules,
    env: int,
    names: Sequence[str],
) -> dict[str, float]:
    """Returns the widths of layers that have changed, in units of their first ones, by slot."""
    first = _of(rules.choices.widths, env, 1)
    now = first if rules.offers is None else rules.offers.widths[env]
    widths = {}
    for name, width, before in zip(names, now.tolist(), first.tolist(), strict=True):
        if width != before:
            widths[name] = width / before
    return widths


def _of(values: Any, env: int, dimensions: int = 0) -> Any:
    """Returns the value of one env: ``values`` have ``dimensions`` if all envs share them, else one more, [E, ...]."""
    return values[env] if np.ndim(values) > dimensions else values


def needs_of(
    slots: Slots,
    env: int,
    names: Sequence[str],
) -> dict[str, float]:
    """Returns the needs that are known of an env's slots."""
    needs = dict(zip(names, slots.need[env].tolist(), strict=True))
    return {slot: need for slot, need in needs.items() if not math.isnan(need)}


def gradients_of(
    state: EnvState,
    env: int,
    names: Sequence[str],
) -> dict[str, dict[str, float]]:
    """Returns the statistics that are known of the gradients of an env's host and of its seeds by slot."""
    slots = state.slots
    places: list[tuple[str, EnvState | Slots, Any]] = [(HOST, state, env)]
    for s, slot in enumerate(names):
        places.append((slot, slots, (env, s)))
    found: dict[str, dict[str, float]] = {}
    for owner, arrays, place in places:
        if math.isnan(arrays.gradient_norm[place]):
            continue
        found[owner] = {}
        for name, field in GRADIENTS.items():
            found[owner][name] = float(getattr(arrays, field)[place])
        if owner != HOST:
            found[owner]["ratio"] = float(slots.gradient_ratio[place])
    return found


def standing_of(env: SlotVectorEnv, controller: str) -> dict[str, str]:
    """Returns what keeps each living seed of a single host from passing on, by slot."""
    slots = env.state.slots
    gates = Gates(slots, env.state.anomaly_pending, env.config.env.gates, env.loop.durations)
    reasons = {}
    for s in np.flatnonzero(slots.living[0]).tolist():
        gate = GATES[SeedStage(int(slots.stage[0, s]))]
        reason = gates.explain((0, s)).reason
        words = f"gate {gate} was open, but {controller} did not let it pass"
        if reason:
            words = f"gate {gate} was closed: {reason}"
        reasons[env.action_spec.slots[s]] = words
    return reasons
