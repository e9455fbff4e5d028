"""Events of hosts in training: actions, gates, stages, epochs and episodes, in the order in which they happen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from esper.config import EnvConfig
from esper.core.action import ActionSpec, Op
from esper.core.gates import GateResult, Gates, Place, germination_gate
from esper.core.mask import ActionMask
from esper.core.slots import Bools, Floats, Ints, Slots
from esper.core.stage import SeedStage
from esper.core.state import EnvState, EpisodeRules
from esper.env.backend import Rollbacks
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
from esper.training.counterfactual import Paired


@dataclass(frozen=True)
class Occupancy:
    """Copies of the stages and blueprints of all slots, to tell what changed since."""

    stage: Ints
    blueprint: Ints

    @classmethod
    def of(cls, slots: Slots) -> Occupancy:
        return cls(slots.stage.copy(), slots.blueprint.copy())

    def removed(self, slots: Slots) -> Bools:
        """Returns the slots [E, S] whose seeds are gone since."""
        return (self.blueprint >= 0) & ~slots.occupied


class Reporter:
    """Passes the events of E hosts to ``emit``; stage changes of an epoch's end are kept until its report."""

    def __init__(
        self,
        emit: Callable[[Event], None],
        spec: ActionSpec,
        config: EnvConfig,
        n_envs: int,
    ) -> None:
        self.emit = emit
        self.spec = spec
        self.config = config
        self._pending: list[list[StageChanged]] = [[] for _ in range(n_envs)]
        self.mask: ActionMask | None = None
        """Legal actions of the next step; None if unknown."""
        self.log_prob: Floats | None = None
        """Log-probabilities [E] of the next actions; None if unknown."""

    def expect(self, log_prob: Floats | None) -> None:
        """Takes the log-probabilities [E] of the next actions, None if they are unknown; a step clears them."""
        self.log_prob = log_prob

    def explain(
        self,
        state: EnvState,
        gates: Gates,
        actions: Ints,
        active: Bools,
    ) -> dict[int, GateResult]:
        """Returns the gate of each env's action, before anything has changed."""
        results = {}
        for env in np.flatnonzero(active).tolist():
            op = int(actions[env, 0])
            slot = int(actions[env, 1])
            if op == Op.GERMINATE:
                empty = bool(state.slots.stage[env, slot] == SeedStage.DORMANT)
                seeds_left = self.config.max_seeds - int(state.slots.living[env].sum())
                results[env] = germination_gate(True, empty, seeds_left)
            elif op in (Op.ADVANCE, Op.FOSSILIZE):
                results[env] = gates.explain((env, slot))
        return results

    def acted(
        self,
        state: EnvState,
        actions: Ints,
        active: Bools,
        gates: Mapping[int, GateResult],
        failures: Mapping[int, str],
        before: Occupancy,
    ) -> None:
        """Reports each env's gate, action and stage changes; ``failures`` are reasons why seeds were not planted."""
        now = Occupancy.of(state.slots)
        for env in np.flatnonzero(active & (actions[:, 0] != Op.WAIT)).tolist():
            action = actions[env]
            reason = failures.get(env, "")
            if env in gates:
                self._gate(state, (env, int(action[1])), gates[env])
                reason = gates[env].reason or reason
            self._action(state, env, action, reason)
            cause = Op(int(action[0])).name.lower()
            for change in self._changes(state, env, before, now, cause):
                self.emit(change)
        self.log_prob = None

    def _action(
        self,
        state: EnvState,
        env: int,
        action: Ints,
        reason: str,
    ) -> None:
        """Reports the action [8] of an env; ``reason`` says why it was refused, and is empty if it was not."""
        heads = {"blueprint": None, **self.spec.decode(action)}  # most ops have none
        masked = None
        if self.mask is not None:
            masked = self.mask.illegal(self.spec, env, action)
        log_prob = None
        if self.log_prob is not None:
            log_prob = float(self.log_prob[env])
        self.emit(
            ActionTaken(
                **_when(state, env),
                **heads,
                accepted=not reason,
                reason=reason,
                masked=masked,
                log_prob=log_prob,
            )
        )

    def ticked(
        self,
        state: EnvState,
        opened: Sequence[tuple[Place, GateResult]],
        before: Occupancy,
        ticked: Occupancy,
    ) -> None:
        """Reports automatic gates, and keeps the stage changes by clocks and by these gates."""
        now = Occupancy.of(state.slots)
        for place, gate in opened:
            self._gate(state, place, gate)
        # First clocks moved, from before to ticked, then gates opened.
        for env, pending in enumerate(self._pending):
            pending += self._changes(state, env, before, ticked, "cooldown", if_removed="faded")
            pending += self._changes(state, env, ticked, now, "automatic", if_removed="stuck in training")

    def governed(
        self,
        state: EnvState,
        before: Occupancy,
        rollbacks: Rollbacks,
    ) -> None:
        """Reports rollbacks, by env, and the seeds that were cut in other envs; keeps the stage changes."""
        now = Occupancy.of(state.slots)
        gone = before.removed(state.slots)
        for env, pending in enumerate(self._pending):
            when = _when(state, env)
            if env in rollbacks:
                cause = "rollback"
                panic, epoch = rollbacks[env]
                rollback = GovernorRollback(
                    **when,
                    **asdict(panic),
                    restored_epoch=epoch,
                    rollbacks=int(state.rollbacks[env]),
                )
                self.emit(rollback)
            else:
                cause = "not finite"
                for s in np.flatnonzero(gone[env]).tolist():
                    blueprint = self.spec.blueprints[before.blueprint[env, s]]
                    self.emit(SeedCut(**when, slot=self.spec.slots[s], blueprint=blueprint))
            pending += self._changes(state, env, before, now, cause)

    def epoch_ended(
        self,
        state: EnvState,
        env: int,
        terms: dict[str, float],
        reward: float,
        rules: EpisodeRules,
        shapley: Callable[[int], Mapping[str, Paired]],
    ) -> None:
        """Reports kept stage changes, the epoch, and an ended episode, with ``shapley`` values of its seeds."""
        for change in self._pending[env]:
            self.emit(change)
        self._pending[env].clear()
        self._epoch(state, env, terms, reward, rules)
        if state.done[env]:
            self._episode(state, env, rules, shapley)

    def _epoch(
        self,
        state: EnvState,
        env: int,
        terms: dict[str, float],
        reward: float,
        rules: EpisodeRules,
    ) -> None:
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
                **_when(state, env),
                **_scores(state, env, rules),
                train_loss=float(state.train_loss[env]),
                train_accuracy=float(state.train_accuracy[env]),
                validation_loss=float(state.loss[env]),
                parameters=rules.choices.host_parameters + int(slots.parameters[env].sum()),
                contributions=contributions,
                contribution_errors=errors,
                stages=stages,
                reward=reward,
                reward_terms=terms,
            )
        )

    def _episode(
        self,
        state: EnvState,
        env: int,
        rules: EpisodeRules,
        shapley: Callable[[int], Mapping[str, Paired]],
    ) -> None:
        slots = state.slots
        kept = np.flatnonzero(slots.fossil[env]).tolist()
        fossils = {}
        for s in kept:
            fossils[self.spec.slots[s]] = self.spec.blueprints[slots.blueprint[env, s]]

        # Of both in one epoch, divergence is named.
        stopped = None
        if state.truncated[env]:
            diverged = "divergence" in self.config.stop_on and state.rolled_back[env]
            stopped = "divergence" if diverged else "plateau"
        self.emit(
            EpisodeCompleted(
                **_scores(state, env, rules),
                env=env,
                episode=int(state.episode[env]),
                epochs=int(state.epoch[env]),
                total_reward=float(state.total_reward[env]),
                host_parameters=rules.choices.host_parameters,
                host_flops=rules.choices.host_flops,
                fossil_flops=float(rules.choices.flops_of(slots)[env, kept].sum()),
                fossils=fossils,
                rollbacks=int(state.rollbacks[env]),
                terminated=not state.truncated[env],
                stopped=stopped,
                shapley={slot: (value.difference, value.error) for slot, value in shapley(env).items()},
            )
        )

    def _gate(
        self,
        state: EnvState,
        place: Place,
        result: GateResult,
    ) -> None:
        env, s = place
        self.emit(
            GateEvaluated(
                **_when(state, env),
                slot=self.spec.slots[s],
                gate=result.gate,
                passed=result.passed,
                score=result.score,
                checks=result.checks,
            )
        )

    def _changes(
        self,
        state: EnvState,
        env: int,
        before: Occupancy,
        now: Occupancy,
        cause: str,
        if_removed: str | None = None,
    ) -> list[StageChanged]:
        """Returns the stage changes of one env; ``if_removed`` replaces the cause of a removal."""
        changes = []
        cause_of_removal = if_removed or cause
        for s in np.flatnonzero(before.stage[env] != now.stage[env]).tolist():
            # A slot without a seed has the blueprint -1.
            index = max(before.blueprint[env, s], now.blueprint[env, s])
            blueprint = self.spec.blueprints[index] if index >= 0 else None
            after = SeedStage(now.stage[env, s])
            change = StageChanged(
                **_when(state, env),
                slot=self.spec.slots[s],
                blueprint=blueprint,
                before=SeedStage(before.stage[env, s]).name,
                after=after.name,
                cause=cause_of_removal if after is SeedStage.PRUNED else cause,
            )
            changes.append(change)
        return changes


def _when(state: EnvState, env: int) -> dict[str, Any]:
    """Returns the fields that tell when an event happened, and in which env."""
    return {
        "env": env,
        "episode": int(state.episode[env]),
        "epoch": int(state.epoch[env]),
    }


def _scores(state: EnvState, env: int, rules: EpisodeRules) -> dict[str, Any]:
    """Returns the fields that the ends of an epoch and of an episode share."""
    return {
        "validation_accuracy": float(state.accuracy[env]),
        "committed_accuracy": float(state.committed[env]),
        "baseline_accuracy": rules.baseline.accuracy[int(state.epoch[env])],
        "fossil_parameters": int(state.slots.fossil_parameters[env]),
    }
