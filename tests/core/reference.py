"""Reference lifecycle of one seed at a time, as plain objects, written independently from the rules.

Nothing of esper.core is used but the names of stages and their values. Accuracies are in percentage points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from esper.config import Durations, EnvConfig, GateConfig
from esper.core.action import Op
from esper.core.stage import SeedStage

S = SeedStage
NEXT = {S.GERMINATED: S.TRAINING, S.TRAINING: S.BLENDING, S.BLENDING: S.HOLDING}
COOLED = {S.PRUNED: S.EMBARGOED, S.EMBARGOED: S.RESETTING, S.RESETTING: S.DORMANT}
LIVING = (S.GERMINATED, S.TRAINING, S.BLENDING, S.HOLDING)
GATE_OF = {S.GERMINATED: "G1", S.TRAINING: "G2", S.BLENDING: "G3", S.HOLDING: "G5"}
FIRST_CURVE = {
    "LINEAR_ADD": "linear",
    "LINEAR_MULTIPLY": "linear",
    "SIGMOID_ADD": "logistic_12",
    "GATED_GATE": "linear",
}

Measured = Mapping[str, float | None]
"""Measurements of a seed by name; None or absent if it was not measured."""


def progress(curve: str, t: float) -> float:
    """Progress in [0, 1] of a ramp at time ``t`` in [0, 1]."""
    if curve == "linear":
        return t
    if curve == "cosine":
        return (1 - math.cos(math.pi * t)) / 2
    steepness = float(curve.partition("_")[2])
    low, here, high = (
        1 / (1 + math.exp(-steepness * (u - 0.5))) for u in (0.0, t, 1.0)
    )
    return (here - low) / (high - low)


@dataclass
class Ramp:
    """A ramp of alpha; it holds if no step is left."""

    alpha: float = 0.0
    start: float = 0.0
    target: float = 0.0
    steps: int = 0
    done: int = 0
    curve: str = "linear"
    velocity: float = 0.0
    alpha_at_tick: float = 0.0

    @property
    def steady(self) -> bool:
        return self.done == self.steps

    @property
    def lowering(self) -> bool:
        return not self.steady and self.target < self.start

    def begin(self, target: float, steps: int, curve: str) -> None:
        """Starts a ramp and takes its first step; 0 steps jump."""
        assert self.steady, "a ramp starts only when alpha holds"
        self.start, self.target, self.steps, self.done, self.curve = (
            self.alpha,
            target,
            steps,
            0,
            curve,
        )
        if steps == 0:
            self.alpha = target
        self.step()

    def step(self) -> None:
        if self.steady:
            return
        self.done += 1
        value = self.start + (self.target - self.start) * progress(
            self.curve, self.done / self.steps
        )
        low, high = sorted((self.start, self.target))
        self.alpha = self.target if self.steady else min(max(value, low), high)

    def tick(self) -> None:
        self.step()
        self.velocity, self.alpha_at_tick = self.alpha - self.alpha_at_tick, self.alpha


@dataclass
class Slot:
    """One slot with its seed."""

    stage: SeedStage = S.DORMANT
    epochs_in_stage: int = 0
    age: int = 0
    ramp: Ramp = field(default_factory=Ramp)
    first_curve: str = "linear"
    tempo: int = 0
    incubation_target: float = 0.0
    fading: bool = False
    measured: Measured = field(default_factory=dict)

    @property
    def living(self) -> bool:
        return self.stage in LIVING

    @property
    def learning(self) -> bool:
        trains = self.stage in (S.TRAINING, S.BLENDING, S.HOLDING, S.FOSSILIZED)
        return trains and not self.ramp.lowering

    def enter(self, stage: SeedStage) -> None:
        self.stage, self.epochs_in_stage = stage, 0

    def germinate(self, style: str, tempo: int, target: float) -> None:
        assert self.stage is S.DORMANT
        self.empty()
        self.first_curve, self.tempo, self.incubation_target = (
            FIRST_CURVE[style],
            tempo,
            target,
        )
        self.enter(S.GERMINATED)

    def advance(self) -> None:
        if self.stage is S.TRAINING:
            self.ramp.begin(self.incubation_target, self.tempo, self.first_curve)
        self.enter(NEXT[self.stage])

    def set_alpha_target(self, target: float, steps: int, curve: str) -> None:
        assert self.stage in (S.BLENDING, S.HOLDING)
        self.ramp.begin(target, steps, curve)
        if self.stage is S.HOLDING and target < 1:
            self.enter(S.BLENDING)

    def prune(self, steps: int, curve: str) -> None:
        if self.stage in (S.BLENDING, S.HOLDING) and self.ramp.alpha > 0 and steps > 0:
            self.ramp.begin(0.0, steps, curve)
            self.fading = True
            if self.stage is S.HOLDING:
                self.enter(S.BLENDING)
            if self.ramp.alpha > 0:
                return
        self.cut()

    def cut(self) -> None:
        assert self.living
        self.empty()
        self.enter(S.PRUNED)

    def empty(self) -> None:
        self.ramp, self.measured = Ramp(), {}
        self.age, self.tempo, self.incubation_target, self.fading = 0, 0, 0.0, False

    def tick(self, embargo: int) -> None:
        self.epochs_in_stage += 1
        if self.stage in COOLED:
            if self.epochs_in_stage >= (embargo if self.stage is S.EMBARGOED else 1):
                self.enter(COOLED[self.stage])
        elif self.stage is not S.DORMANT:
            self.age += 1
            self.ramp.tick()
            if self.fading and self.ramp.steady:
                self.cut()

    def checks(self, config: GateConfig, durations: Durations) -> list[bool]:
        """The checks of the next gate, while no anomaly is pending; empty if there is no gate."""
        strict, epochs, ramp = config.level == "strict", self.epochs_in_stage, self.ramp
        if self.stage is S.GERMINATED:
            return [True]
        if self.stage is S.TRAINING:
            trial, error = self.measured.get("trial"), self.measured.get("trial_error")
            slack = (
                0.0 if strict or error is None else config.trial_standard_errors * error
            )
            held = [
                epochs >= durations.min_training_epochs,
                self.measured.get("exploding") == 0,
                self.at_least("gradient_health", config.min_gradient_health),
                trial is not None and error is not None and trial >= -slack,
            ]
            return (
                [*held, self.at_least("gradient_ratio", config.min_gradient_ratio)]
                if strict
                else held
            )
        if self.stage is S.BLENDING:
            held = [ramp.target >= 1, ramp.steady]
            return [*held, epochs >= durations.min_blending_epochs] if strict else held
        if self.stage is S.HOLDING:
            error = self.measured.get("contribution_error")
            held = [
                self.measured.get("contribution") is not None and error is not None,
                True,
            ]
            noise = config.contribution_standard_errors * (error or 0.0)
            limits = (config.min_contribution, noise) if strict else ()
            return held + [self.at_least("contribution", limit) for limit in limits]
        return []

    def at_least(self, name: str, threshold: float) -> bool:
        value = self.measured.get(name)
        return value is not None and value >= threshold


def automatic_gate(slot: Slot, config: EnvConfig, durations: Durations) -> None:
    """Advances a seed through an automatic gate, or removes it if it has failed G2 for too long."""
    if (
        slot.stage not in NEXT
        or GATE_OF[slot.stage] not in config.auto_advance
        or slot.epochs_in_stage == 0
    ):
        return
    if all(slot.checks(config.gates, durations)):
        slot.advance()
    elif (
        slot.stage is S.TRAINING
        and slot.epochs_in_stage >= durations.max_training_epochs
    ):
        slot.cut()


def legal(
    op: Op, slot: Slot, slots: Sequence[Slot], config: EnvConfig, durations: Durations
) -> bool:
    """Whether an op is allowed in one of the ``slots`` of a host, if every blueprint is affordable."""
    stages = [each.stage for each in slots]
    if op is Op.GERMINATE:
        living, kept = sum(each.living for each in slots), config.max_fossils
        kept = len(slots) if kept is None else kept
        busy = any(stage in (S.GERMINATED, S.TRAINING, *COOLED) for stage in stages)
        room = living < config.max_seeds and living + stages.count(S.FOSSILIZED) < kept
        return slot.stage is S.DORMANT and room and not (config.one_incubating and busy)
    if op is Op.ADVANCE:
        return slot.stage in NEXT and GATE_OF[slot.stage] not in config.auto_advance
    if op is Op.FOSSILIZE:
        return slot.stage is S.HOLDING
    if op is Op.PRUNE:
        return slot.living and slot.age >= durations.min_prune_age and slot.ramp.steady
    return slot.stage in (S.BLENDING, S.HOLDING) and slot.ramp.steady
