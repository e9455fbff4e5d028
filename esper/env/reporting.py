"""Events of hosts in training: actions, gates, stages, epochs and episodes, in the order in which they happen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from esper.attribution.counterfactual import CounterfactualHelper
from esper.config import EnvConfig
from esper.env.baseline import Baseline
from esper.env.state import EnvState
from esper.lifecycle.gates import GateResult, Gates, Place, germination_gate
from esper.lifecycle.slots import Bools, Ints, Slots
from esper.lifecycle.stage import SeedStage
from esper.spaces.action import ActionSpec, Op
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
from esper.training.snapshot import Snapshot

Emit = Callable[[Event], None]


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
    """Emits the events of E hosts; stage changes of an epoch's end are kept until its report.

    Args:
        emit: receives the events.
        spec: names of slots and blueprints.
        config: the cap on seeds, and the conditions that truncate an episode.
    """

    def __init__(self, emit: Emit, spec: ActionSpec, config: EnvConfig) -> None:
        self.emit, self.spec, self.config = emit, spec, config
        self._pending: dict[int, list[StageChanged]] = {}

    def explain(self, state: EnvState, gates: Gates, actions: Ints, active: Bools) -> dict[int, GateResult]:
        """Returns the gate of each env's action, before anything has changed."""
        found = {}
        for env in np.flatnonzero(active).tolist():
            op, slot = int(actions[env, 0]), int(actions[env, 1])
            if op == Op.GERMINATE:
                left = self.config.max_seeds - int(state.slots.living[env].sum())
                found[env] = germination_gate(True, bool(state.slots.stage[env, slot] == SeedStage.DORMANT), left)
            elif op in (Op.ADVANCE, Op.FOSSILIZE):
                found[env] = gates.explain((env, slot))
        return found

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
        for env in np.flatnonzero(active & (actions[:, 0] != Op.WAIT)).tolist():
            op, slot = Op(int(actions[env, 0])), int(actions[env, 1])
            reason = failures.get(env, "")
            if env in gates:
                self._gate(state, (env, slot), gates[env])
                reason = gates[env].reason or reason
            self.emit(
                ActionTaken(
                    **self._when(state, env),
                    op=op.name,
                    slot=self.spec.slots[slot],
                    blueprint=self.spec.blueprints[int(actions[env, 2])] if op is Op.GERMINATE else None,
                    accepted=not reason,
                    reason=reason,
                )
            )
            cause = op.name.lower()
            for change in self._changes(state, env, before, _cause(cause, cause)):
                self.emit(change)

    def ticked(
        self, state: EnvState, opened: Sequence[tuple[Place, GateResult]], before: Occupancy, ticked: Occupancy
    ) -> None:
        """Reports automatic gates, and keeps the stage changes by clocks and by these gates."""
        for place, gate in opened:
            self._gate(state, place, gate)
        for env in range(len(state.epoch)):
            by_clock = self._changes(state, env, before, _cause("faded", "cooldown"), ticked)
            by_gate = self._changes(state, env, ticked, _cause("stuck in training", "automatic"))
            self._keep(env, [*by_clock, *by_gate])

    def seed_cut(self, state: EnvState, place: Place) -> None:
        env, slot = place
        name = self.spec.blueprints[state.slots.blueprint[place]]
        self.emit(SeedCut(**self._when(state, env), slot=self.spec.slots[slot], blueprint=name))

    def rolled_back(self, state: EnvState, env: int, panic: Panic, snapshot: Snapshot) -> None:
        self.emit(
            GovernorRollback(
                **self._when(state, env),
                reason=panic.reason,
                value=panic.value,
                threshold=panic.threshold,
                restored_epoch=snapshot.epoch,
                rollbacks=int(state.rollbacks[env]),
            )
        )

    def governed(self, state: EnvState, env: int, before: Occupancy, cause: str) -> None:
        """Keeps the removals of the governor."""
        self._keep(env, self._changes(state, env, before, _cause(cause, cause)))

    def epoch_ended(
        self,
        state: EnvState,
        env: int,
        terms: dict[str, float],
        reward: float,
        baseline: Baseline,
        host_parameters: int,
        results: CounterfactualHelper,
    ) -> None:
        """Reports kept stage changes, the epoch, and the episode if it has ended; ``results``: its validation."""
        slots, names = state.slots, self.spec.slots
        for change in self._pending.pop(env, []):
            self.emit(change)
        measured = (slots.blended_alpha[env] > 0) & ~np.isnan(slots.contribution[env])
        shown = [(names[s], s) for s in np.flatnonzero(measured).tolist()]
        errors = {name: float(slots.contribution_error[env, s]) for name, s in shown}
        fossil = slots.fossil[env]
        fossil_parameters = int(slots.parameters[env][fossil].sum())
        accuracy, committed = float(state.accuracy[env]), float(state.committed[env])
        alone = baseline.accuracy[int(state.epoch[env])]
        self.emit(
            EpochCompleted(
                **self._when(state, env),
                train_loss=float(state.train_loss[env]),
                train_accuracy=float(state.train_accuracy[env]),
                validation_loss=float(state.loss[env]),
                validation_accuracy=accuracy,
                committed_accuracy=committed,
                baseline_accuracy=alone,
                parameters=host_parameters + int(slots.parameters[env].sum()),
                fossil_parameters=fossil_parameters,
                contributions={name: float(slots.contribution[env, s]) for name, s in shown},
                contribution_errors={name: error for name, error in errors.items() if error == error},
                stages={name: SeedStage(slots.stage[env, s]).name for s, name in enumerate(names)},
                reward=reward,
                reward_terms=terms,
            )
        )
        if state.done[env]:
            self.emit(
                EpisodeCompleted(
                    env=env,
                    episode=int(state.episode[env]),
                    epochs=int(state.epoch[env]),
                    total_reward=float(state.total_reward[env]),
                    validation_accuracy=accuracy,
                    committed_accuracy=committed,
                    baseline_accuracy=alone,
                    host_parameters=host_parameters,
                    fossil_parameters=fossil_parameters,
                    fossils={names[s]: self._blueprint(slots.blueprint[env, s]) for s in np.flatnonzero(fossil)},
                    rollbacks=int(state.rollbacks[env]),
                    terminated=not state.truncated[env],
                    stopped=self._stopped(state, env),
                    shapley={slot: (value.difference, value.error) for slot, value in results.shapley().items()},
                )
            )

    def _stopped(self, state: EnvState, env: int) -> str | None:
        """Returns the condition of ``env.stop_on`` that truncated the episode, or None."""
        if not state.truncated[env]:
            return None
        return "divergence" if "divergence" in self.config.stop_on and state.rolled_back[env] else "plateau"

    def _gate(self, state: EnvState, place: Place, result: GateResult) -> None:
        self.emit(
            GateEvaluated(
                **self._when(state, place[0]),
                slot=self.spec.slots[place[1]],
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
        cause: Callable[[SeedStage], str],
        after: Occupancy | None = None,
    ) -> list[StageChanged]:
        """Returns the stage changes of one env from ``before`` to ``after`` (None: now); ``cause`` is by new stage."""
        now = after or Occupancy(state.slots.stage, state.slots.blueprint)
        return [
            StageChanged(
                **self._when(state, env),
                slot=self.spec.slots[s],
                blueprint=self._blueprint(max(before.blueprint[env, s], now.blueprint[env, s])) or None,
                before=SeedStage(before.stage[env, s]).name,
                after=SeedStage(now.stage[env, s]).name,
                cause=cause(SeedStage(now.stage[env, s])),
            )
            for s in np.flatnonzero(before.stage[env] != now.stage[env]).tolist()
        ]

    def _keep(self, env: int, changes: list[StageChanged]) -> None:
        self._pending.setdefault(env, []).extend(changes)

    def _blueprint(self, index: int) -> str:
        return self.spec.blueprints[index] if index >= 0 else ""

    def _when(self, state: EnvState, env: int) -> dict[str, int]:
        return {"env": env, "episode": int(state.episode[env]), "epoch": int(state.epoch[env])}


def _cause(if_removed: str, otherwise: str) -> Callable[[SeedStage], str]:
    return lambda after: if_removed if after is SeedStage.PRUNED else otherwise
