"""Seeds in arrays live as ``SeedSlot`` does: both are driven by the same actions and compared after every epoch."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from esper.config import TrainingConfig
from esper.env import lifecycle
from esper.env.lifecycle import SeedSlots
from esper.env.planted import PlantedVectorEnv
from esper.lifecycle.ramps import STYLES, AlphaCurve
from esper.lifecycle.stage import ADVANCES, COOLDOWN, SeedStage
from esper.seeds.blueprints import Blueprint
from esper.seeds.gate import GATES, GateResult, SeedMeasurements, evaluate_gate
from esper.seeds.slot import SeedSlot, SlotSite
from esper.spaces.action import HEADS, RELEVANT, Action, Op

S = SeedStage
EPISODES, EPOCHS = 8, 50
PROBE = torch.zeros(1, 2, 2, 2)
MEASURED = {f.name for f in fields(SeedMeasurements)}
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "easy": {"gates": {"trial_standard_errors": 100.0, "min_training_epochs": 1}, "min_prune_age": 2, "embargo": 3},
    "automatic": {
        "auto_advance": ["G1", "G2", "G3"],
        "max_training_epochs": 4,  # a seed may pass in the very epoch that would be its last
        "gates": {"min_training_epochs": 4},
        "min_prune_age": 8,
        "embargo": 2,
    },
    "crowded": {"one_incubating": False, "max_seeds": 2, "max_fossils": 2, "min_prune_age": 3, "embargo": 1},
    "strict": {
        "gates": {
            "level": "strict",
            "min_training_epochs": 2,
            "min_blending_epochs": 6,
            "min_contribution": 0.1,
            "contribution_standard_errors": 0.5,
        },
        "min_prune_age": 6,
        "embargo": 1,
    },
}


class Twin:
    """One env's slots as objects, with the rules of the spec written out a second time."""

    def __init__(self, env: PlantedVectorEnv) -> None:
        self.env = env
        assert env.rules is not None
        self.rules = env.rules
        self.slots = [
            SeedSlot(SlotSite(name, 2), self.rules.durations.embargo, lambda _change: None) for name in env.law.slots
        ]
        self.refused = 0

    def gate(self, slot: SeedSlot) -> GateResult | None:
        target = S.FOSSILIZED if slot.stage is S.HOLDING else ADVANCES.get(slot.stage)
        if target is None:
            return None
        return evaluate_gate(target, slot.evidence(False), self.env.config.env.gates, self.rules.durations)

    def legal(self, op: Op, slot: SeedSlot) -> bool:
        config, stages = self.env.config.env, [slot.stage for slot in self.slots]
        living, fossils = sum(slot.living for slot in self.slots), stages.count(S.FOSSILIZED)
        if op is Op.GERMINATE:
            kept = len(stages) if config.max_fossils is None else config.max_fossils
            busy = config.one_incubating and any(stage in (S.GERMINATED, S.TRAINING, *COOLDOWN) for stage in stages)
            return slot.stage is S.DORMANT and living < config.max_seeds and living + fossils < kept and not busy
        if op is Op.ADVANCE:
            return slot.stage in ADVANCES and GATES[ADVANCES[slot.stage]][0] not in config.auto_advance
        if op is Op.FOSSILIZE:
            return slot.stage is S.HOLDING
        if op is Op.PRUNE:
            return slot.living and slot.age >= self.rules.durations.min_prune_age and slot.alpha.holding
        return slot.stage in (S.BLENDING, S.HOLDING) and slot.alpha.holding

    def act(self, row: NDArray[np.int64]) -> None:
        action = Action.decode(row)
        if action.op is Op.WAIT:
            return
        slot, curve = self.slots[action.slot], AlphaCurve(action.alpha_curve)
        if not self.legal(action.op, slot):
            return
        gate = self.gate(slot)
        if action.op is Op.GERMINATE:
            name = self.env.law.blueprints[action.blueprint]
            body = Blueprint("planted", name, "", lambda c: nn.Conv2d(c, c, 1), lambda c: c * c + c)
            slot.germinate(body, STYLES[action.style], action.tempo, action.alpha_target, PROBE)
        elif action.op is Op.PRUNE:
            slot.prune(action.alpha_speed, curve, "prune")
        elif action.op is Op.SET_ALPHA_TARGET:
            slot.set_alpha_target(action.alpha_target, action.alpha_speed, curve)
        elif gate is None or not gate.passed:
            self.refused += 1
        elif action.op is Op.ADVANCE:
            slot.advance("advance")
        else:
            slot.fossilize()

    def measure(self, seeds: SeedSlots, env: int) -> None:
        """Both are judged by the same measurements."""
        for place, slot in enumerate(self.slots):
            values = {name: float(getattr(seeds, name)[env, place]) for name in MEASURED}
            slot.measured = SeedMeasurements(**{k: None if np.isnan(v) else v for k, v in values.items()})  # type: ignore[arg-type]

    def tick(self) -> None:
        automatic, limit = self.env.config.env.auto_advance, self.rules.durations.max_training_epochs
        for slot in self.slots:
            slot.tick()
        for slot in self.slots:
            gate, after = self.gate(slot), ADVANCES.get(slot.stage)
            if gate is None or after is None or gate.gate not in automatic or slot.epochs_in_stage == 0:
                continue
            if gate.passed:
                slot.advance("automatic")
            elif slot.incubating and slot.epochs_in_stage >= limit:
                slot.cut("stuck")

    def values(self, slot: SeedSlot) -> dict[str, float]:
        gate, alpha = self.gate(slot), slot.alpha
        return {
            "stage": slot.stage,
            "epochs_in_stage": slot.epochs_in_stage,
            "age": slot.age,
            "alpha": alpha.alpha,
            "alpha_start": alpha.start,
            "alpha_target": alpha.target,
            "alpha_steps": alpha.steps,
            "alpha_done": alpha.done,
            "alpha_velocity": alpha.velocity,
            "incubation_target": slot.incubation_target,
            "fading": slot.fading,
            "holding": alpha.holding,
            "learning": slot.learning,
            "gate_score": gate.score if gate else 0.0,
            "gate_passed": gate is not None and gate.passed,
        }


def draw(random: np.random.Generator, twin: Twin) -> NDArray[np.int64]:
    """Anything at all one time in four; else something that the rules allow, steps onward being likelier."""
    spec = twin.env.action_spec
    row = np.array([random.integers(size) for size in spec.sizes])
    allowed = [(op, place) for op in RELEVANT for place, slot in enumerate(twin.slots) if op and twin.legal(op, slot)]
    if random.random() < 0.25 or not allowed:
        return row
    onward = [pair for pair in allowed if pair[0] in (Op.GERMINATE, Op.ADVANCE, Op.FOSSILIZE)]
    pool = onward if onward and random.random() < 0.6 else allowed
    row[:2] = pool[random.integers(len(pool))]
    return row


@pytest.mark.parametrize("name", CONFIGS)
def test_seeds_in_arrays_live_as_slots_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    envs = 6
    config = TrainingConfig.parse({"env": {"n_envs": envs, "episode_length": EPOCHS, **CONFIGS[name]}})
    env = PlantedVectorEnv(config)
    measured: list[SeedSlots] = []

    def tick(seeds: SeedSlots, *rest: Any) -> None:
        measured.append(copy.deepcopy(seeds))  # a seed that goes in this tick takes its measurements along
        original(seeds, *rest)

    original = lifecycle.tick
    monkeypatch.setattr(lifecycle, "tick", tick)
    random = np.random.default_rng(sum(map(ord, name)))
    seen: set[SeedStage] = set()
    faded, illegal = 0, 0
    for _episode in range(EPISODES):  # fossils stay, so that a long episode ends with nothing to do
        env.reset(seed=0)
        twins = [Twin(env) for _ in range(envs)]
        for epoch in range(EPOCHS):
            rows = np.array([draw(random, twin) for twin in twins])
            for twin, row in zip(twins, rows, strict=True):
                twin.act(row)
            before = env.illegal_actions.sum()
            env.step(rows)
            illegal += int(env.illegal_actions.sum() - before)
            for e, twin in enumerate(twins):
                twin.measure(measured[-1], e)
                twin.tick()
                for place, slot in enumerate(twin.slots):
                    values = twin.values(slot)
                    mine = {key: getattr(env.seeds, key)[e, place] for key in values}
                    assert mine == values, (epoch, e, slot.name)
                    seen.add(slot.stage)
                    faded += slot.fading
                    for op in (op for op in Op if op is not Op.WAIT):
                        affordable = op is not Op.GERMINATE or env.mask.slot_blueprint[e, place].any()
                        assert env.mask.op_slot[e, op, place] == (twin.legal(op, slot) and affordable), (op, values)
    # The comparison is worth something only if everything happened; an automatic G1 leaves no epoch for GERMINATED.
    assert seen == set(S) - ({S.GERMINATED} if name == "automatic" else set())
    assert faded
    assert illegal
    assert name == "automatic" or sum(twin.refused for twin in twins) > 0


def test_every_ramp_of_the_table_is_the_curve() -> None:
    """The reference ramps of the lifecycle spec: to 1.0 in 5 steps."""
    curves = [curve.value for curve in AlphaCurve]
    ramps = {name: lifecycle._RAMPS[curves.index(name), 5, 1:6] for name in curves}
    assert ramps["linear"] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert ramps["cosine"] == pytest.approx([0.0955, 0.3455, 0.6545, 0.9045, 1.0], abs=1e-4)
    assert ramps["logistic_12"] == pytest.approx([0.0242, 0.2301, 0.7699, 0.9758, 1.0], abs=1e-4)


def test_a_gated_seed_has_the_gates_parameters() -> None:
    env = PlantedVectorEnv(TrainingConfig.parse({"env": {"n_envs": 2}}))
    env.reset(seed=0)
    spec = env.action_spec
    rows = [spec.encode(Op.GERMINATE, "r0c0", "oak", style=style) for style in ("LINEAR_ADD", "GATED_GATE")]
    env.step(np.array(rows))
    oak = env.law.parameters[env.law.blueprints.index("oak")]
    assert env.seeds.parameters[:, 0].tolist() == [oak, oak + env.law.gate_parameters]
    assert rows[0].shape == (len(HEADS),)
