"""Execution of actions on slots: one function per op, each behind its gate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from esper.env.context import RunContext
from esper.seeds.alpha import AlphaCurve
from esper.seeds.blend import STYLES
from esper.seeds.gate import GATES, GateResult, evaluate_gate, germination_gate
from esper.seeds.slot import GerminationFailed, SeedSlot
from esper.seeds.stage import ADVANCES, SeedStage
from esper.spaces.action import Action, Op
from esper.telemetry.event import ActionTaken, GateEvaluated
from esper.training.governor import Governor
from esper.training.host_training import HostTraining


class Growing(Protocol):
    """The parts of an episode that actions and gates use."""

    training: HostTraining
    world: RunContext
    slots: list[SeedSlot]
    governor: Governor

    @property
    def index(self) -> int: ...
    @property
    def epoch(self) -> int: ...


@dataclass(frozen=True)
class Outcome:
    """Result of an action; ``reason`` says why it was refused, or is empty."""

    op: Op
    succeeded: bool
    reason: str


def apply_action(episode: Growing, action: Action) -> Outcome:
    """Executes one legal action and emits its event, except for WAIT."""
    if action.op is Op.WAIT:
        return Outcome(Op.WAIT, True, "")
    slot = episode.slots[action.slot]
    blueprint = episode.world.spec.blueprints[action.blueprint] if action.op is Op.GERMINATE else None
    reason = _OPS[action.op](episode, slot, action)
    episode.training.forget_removed_seeds()
    episode.world.emit(
        ActionTaken(
            env=episode.index,
            episode=episode.training.episode,
            epoch=episode.epoch,
            op=action.op.name,
            slot=slot.name,
            blueprint=blueprint,
            accepted=not reason,
            reason=reason,
        )
    )
    return Outcome(action.op, not reason, reason)


def _germinate(episode: Growing, slot: SeedSlot, action: Action) -> str:
    name = episode.world.spec.blueprints[action.blueprint]
    left = episode.world.config.env.max_seeds - sum(s.living for s in episode.slots)
    gate = germination_gate(True, slot.stage is SeedStage.DORMANT, left)
    _report(episode, slot, gate)
    if not gate.passed:
        return gate.reason
    blueprint = episode.world.blueprints.get(episode.training.host.topology, name)
    try:
        episode.training.germinate(slot, blueprint, STYLES[action.style], action.tempo, action.alpha_target)
    except GerminationFailed as failure:
        return str(failure)
    return ""


def _advance(episode: Growing, slot: SeedSlot, _action: Action) -> str:
    gate = next_gate(episode, slot)
    assert gate is not None
    _report(episode, slot, gate)
    if gate.passed:
        slot.advance("advance")
    return gate.reason


def _fossilize(episode: Growing, slot: SeedSlot, _action: Action) -> str:
    gate = next_gate(episode, slot)
    assert gate is not None
    _report(episode, slot, gate)
    if gate.passed:
        slot.fossilize()
    return gate.reason


def _prune(_episode: Growing, slot: SeedSlot, action: Action) -> str:
    slot.prune(action.alpha_speed, AlphaCurve(action.alpha_curve), "prune")
    return ""


def _set_alpha_target(_episode: Growing, slot: SeedSlot, action: Action) -> str:
    slot.set_alpha_target(action.alpha_target, action.alpha_speed, AlphaCurve(action.alpha_curve))
    return ""


_OPS: Mapping[Op, Callable[[Growing, SeedSlot, Action], str]] = MappingProxyType(
    {
        Op.GERMINATE: _germinate,
        Op.SET_ALPHA_TARGET: _set_alpha_target,
        Op.PRUNE: _prune,
        Op.FOSSILIZE: _fossilize,
        Op.ADVANCE: _advance,
    }
)


def next_gate(episode: Growing, slot: SeedSlot) -> GateResult | None:
    """Evaluates the gate of the slot's next stage (ADVANCE, or FOSSILIZE from HOLDING); None if it has no gate."""
    target = SeedStage.FOSSILIZED if slot.stage is SeedStage.HOLDING else ADVANCES.get(slot.stage)
    if target is None:
        return None
    evidence = slot.evidence(episode.governor.anomaly_pending)
    return evaluate_gate(target, evidence, episode.world.config.env.gates, episode.training.durations)


def automatic_gates(episode: Growing) -> None:
    """Opens automatic gates (``env.auto_advance``) and prunes seeds that fail an automatic G2 for too long."""
    automatic = episode.world.config.env.auto_advance
    for slot in episode.slots:
        target = ADVANCES.get(slot.stage)
        if target is None or GATES[target][0] not in automatic or slot.epochs_in_stage == 0:
            continue
        gate = next_gate(episode, slot)
        assert gate is not None
        if gate.passed:
            _report(episode, slot, gate)
            slot.advance("automatic")
        elif target is SeedStage.BLENDING and slot.epochs_in_stage >= episode.training.durations.max_training_epochs:
            slot.cut("stuck in training")


def _report(episode: Growing, slot: SeedSlot, gate: GateResult) -> None:
    episode.world.emit(
        GateEvaluated(
            env=episode.index,
            episode=episode.training.episode,
            epoch=episode.epoch,
            slot=slot.name,
            gate=gate.gate,
            passed=gate.passed,
            score=gate.score,
            checks=tuple((check.name, check.held, check.value, check.threshold) for check in gate.checks),
        )
    )
