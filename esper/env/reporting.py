"""Events of hosts in training: actions, gates, stages, epochs and episodes, in the order in which they happen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from esper.attribution.paired import Paired
from esper.config import EnvConfig
from esper.env.state import EnvState, Rules
from esper.lifecycle.gates import GateResult, Gates, Place, germination_gate
from esper.lifecycle.slots import Bools, Floats, Ints, Slots
from esper.lifecycle.stage import SeedStage
from esper.spaces.action import ActionSpec, Op
from esper.spaces.mask import ActionMask
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
from esper.training.governor import Panic


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
        return np.asarray((self.blueprint >= 0) & ~slots.occupied)


class Reporter:
    """Passes the events of E hosts to ``emit``; stage changes of an epoch's end are kept until its report."""

    def __init__(self, emit: Callable[[Event], None], spec: ActionSpec, config: EnvConfig, n_envs: int) -> None:
        self.emit, self.spec, self.config = emit, spec, config
        self._pending: list[list[StageChanged]] = [[] for _ in range(n_envs)]
        self.mask: ActionMask | None = None
        """Legal actions of the next step; None if unknown."""
        self.log_prob: Floats | None = None
        """Log-probabilities [E] of the next actions; None if unknown. Set before a step, which clears it."""

    def explain(self, state: EnvState, gates: Gates, actions: Ints, active: Bools) -> dict[int, GateResult]:
        """Returns the gate of each env's action, before anything has changed."""
        results = {}
        for env in np.flatnonzero(active).tolist():
            op, slot = int(actions[env, 0]), int(actions[env, 1])
            if op == Op.GERMINATE:
                left = self.config.max_seeds - int(state.slots.living[env].sum())
                results[env] = germination_gate(True, bool(state.slots.stage[env, slot] == SeedStage.DORMANT), left)
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
            op, slot, reason = Op(int(actions[env, 0])), int(actions[env, 1]), failures.get(env, "")
            if env in gates:
                self._gate(state, (env, slot), gates[env])
                reason = gates[env].reason or reason
            self.emit(
                ActionTaken(
                    **self._when(state, env),
                    **{"blueprint": None, **self.spec.decode(actions[env])},
                    accepted=not reason,
                    reason=reason,
                    masked=None if self.mask is None else self.mask.illegal(self.spec, env, actions[env]),
                    log_prob=None if self.log_prob is None else float(self.log_prob[env]),
                )
            )
            for change in self._changes(state, env, before, now, op.name.lower()):
                self.emit(change)
        self.log_prob = None

    def ticked(
        self, state: EnvState, opened: Sequence[tuple[Place, GateResult]], before: Occupancy, ticked: Occupancy
    ) -> None:
        """Reports automatic gates, and keeps the stage changes by clocks and by these gates."""
        now = Occupancy.of(state.slots)
        for place, gate in opened:
            self._gate(state, place, gate)
        for env, pending in enumerate(self._pending):
            pending += self._changes(state, env, before, ticked, "cooldown", if_removed="faded")
            pending += self._changes(state, env, ticked, now, "automatic", if_removed="stuck in training")

    def governed(self, state: EnvState, before: Occupancy, rollbacks: Mapping[int, tuple[Panic, int]]) -> None:
        """Reports rollbacks, by env, and the seeds that were cut in other envs; keeps the stage changes."""
        now, gone = Occupancy.of(state.slots), before.removed(state.slots)
        for env, pending in enumerate(self._pending):
            when = self._when(state, env)
            if env in rollbacks:
                panic, epoch = rollbacks[env]
                count = int(state.rollbacks[env])
                self.emit(GovernorRollback(**when, **asdict(panic), restored_epoch=epoch, rollbacks=count))
            else:
                for s in np.flatnonzero(gone[env]).tolist():
                    name = self.spec.blueprints[before.blueprint[env, s]]
                    self.emit(SeedCut(**when, slot=self.spec.slots[s], blueprint=name))
            pending += self._changes(state, env, before, now, "rollback" if env in rollbacks else "not finite")

    def epoch_ended(
        self,
        state: EnvState,
        env: int,
        terms: dict[str, float],
        reward: float,
        rules: Rules,
        shapley: Callable[[int], Mapping[str, Paired]],
    ) -> None:
        """Reports kept stage changes, the epoch, and an ended episode, with ``shapley`` values of its seeds."""
        slots, names = state.slots, self.spec.slots
        for change in self._pending[env]:
            self.emit(change)
        self._pending[env].clear()
        measured = (slots.alpha_on[env] > 0) & ~np.isnan(slots.contribution[env])
        shown = {names[s]: (env, s) for s in np.flatnonzero(measured).tolist()}
        errors = {name: float(slots.contribution_error[at]) for name, at in shown.items()}
        now: dict[str, Any] = {
            "validation_accuracy": float(state.accuracy[env]),
            "committed_accuracy": float(state.committed[env]),
            "baseline_accuracy": rules.baseline.accuracy[int(state.epoch[env])],
            "fossil_parameters": int(slots.fossil_parameters[env]),
        }
        self.emit(
            EpochCompleted(
                **self._when(state, env),
                **now,
                train_loss=float(state.train_loss[env]),
                train_accuracy=float(state.train_accuracy[env]),
                validation_loss=float(state.loss[env]),
                parameters=rules.choices.host_parameters + int(slots.parameters[env].sum()),
                contributions={name: float(slots.contribution[at]) for name, at in shown.items()},
                contribution_errors={name: error for name, error in errors.items() if error == error},
                stages={name: SeedStage(slots.stage[env, s]).name for s, name in enumerate(names)},
                reward=reward,
                reward_terms=terms,
            )
        )
        if state.done[env]:
            fossils = np.flatnonzero(slots.fossil[env]).tolist()
            diverged = "divergence" in self.config.stop_on and state.rolled_back[env]
            stopped = "divergence" if diverged else "plateau"
            self.emit(
                EpisodeCompleted(
                    **now,
                    env=env,
                    episode=int(state.episode[env]),
                    epochs=int(state.epoch[env]),
                    total_reward=float(state.total_reward[env]),
                    host_parameters=rules.choices.host_parameters,
                    host_flops=rules.choices.host_flops,
                    fossil_flops=float(rules.choices.flops_of(slots)[env, fossils].sum()),
                    fossils={names[s]: self.spec.blueprints[slots.blueprint[env, s]] for s in fossils},
                    rollbacks=int(state.rollbacks[env]),
                    terminated=not state.truncated[env],
                    stopped=stopped if state.truncated[env] else None,
                    shapley={slot: (value.difference, value.error) for slot, value in shapley(env).items()},
                )
            )

    def _gate(self, state: EnvState, place: Place, result: GateResult) -> None:
        when, slot = self._when(state, place[0]), self.spec.slots[place[1]]
        score, checks = result.score, result.checks
        self.emit(GateEvaluated(**when, slot=slot, gate=result.gate, passed=result.passed, score=score, checks=checks))

    def _changes(
        self, state: EnvState, env: int, before: Occupancy, now: Occupancy, cause: str, if_removed: str | None = None
    ) -> list[StageChanged]:
        """Returns the stage changes of one env; ``if_removed`` replaces the cause of a removal."""
        changes = []
        for s in np.flatnonzero(before.stage[env] != now.stage[env]).tolist():
            blueprint = max(before.blueprint[env, s], now.blueprint[env, s])
            after = SeedStage(now.stage[env, s])
            changes.append(
                StageChanged(
                    **self._when(state, env),
                    slot=self.spec.slots[s],
                    blueprint=self.spec.blueprints[blueprint] if blueprint >= 0 else None,
                    before=SeedStage(before.stage[env, s]).name,
                    after=after.name,
                    cause=if_removed if if_removed and after is SeedStage.PRUNED else cause,
                )
            )
        return changes

    def _when(self, state: EnvState, env: int) -> dict[str, Any]:
        return {"env": env, "episode": int(state.episode[env]), "epoch": int(state.epoch[env])}
