"""Seeds in arrays live as the reference does: both are driven by the same actions and compared after every epoch."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from esper.config import TrainingConfig
from esper.core import transitions
from esper.core.action import HEADS, RELEVANT, Op
from esper.core.slots import MEASUREMENTS, Slots
from esper.core.stage import SeedStage
from esper.env.planted import PlantedVectorEnv
from tests.core.reference import Slot, automatic_gate, legal
from tests.core.spaces_helpers import Action
from tests.selection import slow_except

S = SeedStage
EPISODES, EPOCHS = 4, 50
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "easy": {
        "gates": {"trial_standard_errors": 100.0, "min_training_epochs": 1},
        "min_prune_age": 2,
        "embargo": 3,
    },
    "automatic": {
        "auto_advance": ["G1", "G2", "G3"],
        "max_training_epochs": 4,  # a seed may pass in the very epoch that would be its last
        "gates": {"min_training_epochs": 4},
        "min_prune_age": 8,
        "embargo": 2,
    },
    "crowded": {
        "one_incubating": False,
        "max_seeds": 2,
        "max_fossils": 2,
        "min_prune_age": 3,
        "embargo": 1,
    },
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
    """The slots of one env, by the reference."""

    def __init__(self, env: PlantedVectorEnv) -> None:
        self.env, self.config = env, env.config.env
        assert env.rules is not None
        self.durations = env.loop.durations
        self.slots = [Slot() for _ in env.law.slots]
        self.refused = 0

    def legal(self, op: Op, slot: Slot) -> bool:
        return legal(op, slot, self.slots, self.config, self.durations)

    def passes(self, slot: Slot) -> bool:
        return all(slot.checks(self.config.gates, self.durations))

    def act(self, row: NDArray[np.int64]) -> None:
        action = Action.decode(row)
        if action.op is Op.WAIT:
            return
        slot = self.slots[action.slot]
        if not self.legal(action.op, slot):
            return
        if action.op is Op.GERMINATE:
            slot.germinate(action.style, action.tempo, action.alpha_target)
        elif action.op is Op.PRUNE:
            slot.prune(action.alpha_speed, action.alpha_curve)
        elif action.op is Op.SET_ALPHA_TARGET:
            slot.set_alpha_target(
                action.alpha_target, action.alpha_speed, action.alpha_curve
            )
        elif not self.passes(slot):
            self.refused += 1
        elif action.op is Op.ADVANCE:
            slot.advance()
        else:
            slot.enter(S.FOSSILIZED)

    def measure(self, slots: Slots, env: int) -> None:
        """Both are judged by the same measurements."""
        for place, slot in enumerate(self.slots):
            values = {
                name: float(getattr(slots, name)[env, place]) for name in MEASUREMENTS
            }
            slot.measured = {
                name: None if np.isnan(value) else value
                for name, value in values.items()
            }

    def tick(self) -> None:
        for slot in self.slots:
            slot.tick(self.durations.embargo)
        for slot in self.slots:
            automatic_gate(slot, self.config, self.durations)

    def values(self, slot: Slot) -> dict[str, float]:
        checks, ramp = slot.checks(self.config.gates, self.durations), slot.ramp
        return {
            "stage": slot.stage,
            "epochs_in_stage": slot.epochs_in_stage,
            "age": slot.age,
            "alpha": ramp.alpha,
            "alpha_start": ramp.start,
            "alpha_target": ramp.target,
            "alpha_steps": ramp.steps,
            "alpha_done": ramp.done,
            "alpha_velocity": ramp.velocity,
            "incubation_target": slot.incubation_target,
            "fading": slot.fading,
            "steady": ramp.steady,
            "learning": slot.learning,
            "gate_score": sum(checks) / len(checks) if checks else 0.0,
            "gate_passed": bool(checks) and all(checks),
        }


def draw(random: np.random.Generator, twin: Twin) -> NDArray[np.int64]:
    """A random action: any action in a quarter of the cases, otherwise a legal one, more often an advance."""
    spec = twin.env.action_spec
    row = np.array([random.integers(size) for size in spec.sizes])
    allowed = [
        (op, place)
        for op in RELEVANT
        for place, slot in enumerate(twin.slots)
        if op and twin.legal(op, slot)
    ]
    if random.random() < 0.25 or not allowed:
        return row
    onward = [
        pair for pair in allowed if pair[0] in (Op.GERMINATE, Op.ADVANCE, Op.FOSSILIZE)
    ]
    pool = onward if onward and random.random() < 0.6 else allowed
    row[:2] = pool[random.integers(len(pool))]
    return row


@pytest.mark.parametrize("name", slow_except(["default"], CONFIGS))
def test_seeds_in_arrays_live_as_the_reference_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    envs = 6
    config = TrainingConfig.parse(
        {"env": {"n_envs": envs, "episode_length": EPOCHS, **CONFIGS[name]}}
    )
    env = PlantedVectorEnv(config)
    measured: list[Slots] = []

    def tick(slots: Slots, *rest: Any) -> None:
        measured.append(
            copy.deepcopy(slots)
        )  # a seed that goes in this tick takes its measurements along
        original(slots, *rest)

    original = transitions.tick
    monkeypatch.setattr(transitions, "tick", tick)
    random = np.random.default_rng(sum(map(ord, name)))
    seen: set[SeedStage] = set()
    faded, illegal = 0, 0
    for _episode in range(
        EPISODES
    ):  # fossils stay, so that a long episode ends with nothing to do
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
                    mine = {
                        key: getattr(env.state.slots, key)[e, place] for key in values
                    }
                    assert mine == values, (epoch, e, place)
                    seen.add(slot.stage)
                    faded += slot.fading
                    for op in (op for op in Op if op is not Op.WAIT):
                        affordable = (
                            op is not Op.GERMINATE
                            or env.mask.slot_blueprint[e, place].any()
                        )
                        assert env.mask.op_slot[e, op, place] == (
                            twin.legal(op, slot) and affordable
                        ), (op, values)
    # The comparison is worth something only if everything happened; an automatic G1 leaves no epoch for GERMINATED.
    assert seen == set(S) - ({S.GERMINATED} if name == "automatic" else set())
    assert faded
    assert illegal
    assert name == "automatic" or sum(twin.refused for twin in twins) > 0


def test_a_gated_seed_has_the_gates_parameters() -> None:
    env = PlantedVectorEnv(TrainingConfig.parse({"env": {"n_envs": 2}}))
    env.reset(seed=0)
    spec = env.action_spec
    rows = [
        spec.encode(Op.GERMINATE, "r0c0", "oak", style=style)
        for style in ("LINEAR_ADD", "GATED_GATE")
    ]
    env.step(np.array(rows))
    oak = env.law.parameters[env.law.blueprints.index("oak")]
    assert env.state.slots.parameters[:, 0].tolist() == [
        oak,
        oak + env.law.gate_parameters,
    ]
    assert rows[0].shape == (len(HEADS),)
