"""Measurements of a Grower: how often it evaluates, and that what was not measured is absent."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper.agents.controller import EnvView, PerEnvController
from esper.config import TrainingConfig
from esper.core.action import Op
from esper.core.stage import SeedStage
from esper.grower.grower import Grower
from esper.grower.report import GrowthStep
from esper.telemetry.event import EpochCompleted, Event
from tests.grower.loops import LENIENT, X, Y, scores

KEPT = ("r0c0", "r0c1", "r0c2")
"""Slots whose seeds are kept; those of the others stay living."""
LIVING = ("r0c3", "r0c4", "r0c5")
SITES = {slot: f"body.{place}" for place, slot in enumerate((*KEPT, *LIVING))}
EPOCHS = 40


class Crowd(PerEnvController):
    """Keeps the seeds of some slots, one after the other, then fills ``count`` others and keeps none of them."""

    count = 3

    def choose(self, env: int, view: EnvView) -> Any:
        for slot in KEPT:
            if view.stage(slot) is not SeedStage.FOSSILIZED:
                return self._raise(slot, view)
        for slot in LIVING[: self.count]:
            if view.stage(slot) is not SeedStage.HOLDING and self._can_be_raised(
                slot, view
            ):
                return self._raise(slot, view)
        return self.spec.encode(Op.WAIT)

    def _can_be_raised(self, slot: str, view: EnvView) -> bool:
        return view.stage(slot) is SeedStage.DORMANT or bool(
            view.slot(slot, "gate_passed")
        )

    def _raise(self, slot: str, view: EnvView) -> Any:
        """Returns the action that brings a seed on by one stage, or WAIT."""
        if view.legal(Op.GERMINATE, slot):
            return self.spec.encode(Op.GERMINATE, slot, "mlp_small", tempo=3)
        for op in (Op.ADVANCE, Op.FOSSILIZE):
            if view.legal(op, slot) and view.slot(slot, "gate_passed"):
                return self.spec.encode(op, slot)
        return self.spec.encode(Op.WAIT)


class One(Crowd):
    count = 1


class Counted:
    """A model of six layers in a loop that counts the calls of ``evaluate``, each of which is noted with its step."""

    def __init__(
        self, controller: Any, config: TrainingConfig, **arguments: Any
    ) -> None:
        torch.manual_seed(0)
        self.events: list[Event] = []
        self.model = nn.Sequential()
        self.model.body = nn.Sequential(
            *[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in SITES]
        )
        self.model.head = nn.Linear(8, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05)
        common = {
            "topology": "mlp",
            "config": config,
            "callbacks": [self.events.append],
        }
        self.grower = Grower(
            self.model, SITES, self.optimizer, controller, EPOCHS, **common, **arguments
        )
        self.calls: list[int] = []
        self.steps: list[GrowthStep] = []

    def evaluate(self, model: nn.Module) -> Tensor:
        self.calls[-1] += 1
        return scores(model)

    def run(self, epochs: int = EPOCHS) -> Counted:
        for _ in range(epochs):
            self.model.train()
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(X), Y).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.calls.append(0)
            self.steps.append(self.grower.step(self.evaluate))
        return self

    def on(self, alphas: dict[str, float]) -> float:
        """Returns the score of the model with these alphas."""
        with self.grower.hooks.override_alphas(alphas):
            return float(scores(self.model).mean())


@cache
def crowd(controller: Any) -> Counted:
    """The whole loop, which tests only read."""
    return Counted(controller, CROWDED).run()


CROWDED = LENIENT.with_values(env={"one_incubating": False})


def living(step: GrowthStep) -> int:
    stages = {"GERMINATED", "TRAINING", "BLENDING", "HOLDING"}
    return sum(slot.stage in stages for slot in step.slots.values())


def of_stage(step: GrowthStep, *stages: str) -> list[str]:
    return [name for name, slot in step.slots.items() if slot.stage in stages]


@pytest.mark.parametrize(("controller", "count"), [(One, 1), (Crowd, 3)])
def test_a_step_evaluates_at_most_two_networks_and_one_for_each_living_seed(
    controller: Any, count: int
) -> None:
    """Kept seeds cost nothing; once in a loop, one network is scored again, which shows the noise."""
    loop = crowd(controller)
    first = next(place for place, calls in enumerate(loop.calls) if calls > 1)
    calls = [number - (place == first) for place, number in enumerate(loop.calls)]
    allowed = [2, *(2 + living(step) for step in loop.steps)]
    assert all(number <= most for number, most in zip(calls, allowed, strict=False))
    assert of_stage(loop.steps[-1], "FOSSILIZED") == list(KEPT)
    assert of_stage(loop.steps[-1], "HOLDING") == list(LIVING[:count])
    assert calls[-1] == 2 + count, "each of them is measured"


def test_what_was_not_measured_is_absent() -> None:
    """Kept seeds have no contribution; without any seed, the model is not scored beside two or more blended ones."""
    loop = Counted(Crowd, CROWDED, governor=True).run()
    last = loop.steps[-1]
    assert last.without_seeds is None
    assert [last.slots[slot].contribution for slot in KEPT] == [None] * 3
    full = dict.fromkeys(SITES, 1.0)
    assert last.score == pytest.approx(loop.on(full))
    assert last.committed == pytest.approx(loop.on(dict.fromkeys(KEPT, 1.0)))
    for slot in LIVING:
        without = loop.on({name: alpha for name, alpha in full.items() if name != slot})
        assert last.slots[slot].contribution == pytest.approx(last.score - without)
    assert all(step.rollback is None for step in loop.steps), (
        "a loss that was not measured is no bad one"
    )
    epochs = [event for event in loop.events if isinstance(event, EpochCompleted)]
    assert set(epochs[-1].contributions) == set(LIVING)
    assert all(math.isfinite(event.reward) for event in epochs)


def test_observations_hold_no_number_that_was_not_measured() -> None:
    loop = crowd(Crowd)
    env = loop.grower.env
    assert env is not None
    observation = env._observe(env.rules)[0]

    def read(name: str) -> float:
        return float(env.layout.read(observation, name))

    assert [read(name) for name in ("all_off_accuracy", "all_off_loss")] == [
        0.0,
        0.0,
    ]
    for slot in KEPT:
        names = (
            "contribution",
            "contribution_measured",
            "contribution_error",
            "contribution_change",
            "interaction",
        )
        assert [
            read(f"{slot}/{name}") for name in (*names, "epochs_since_measured")
        ] == [0.0] * 6
    assert all(read(f"{slot}/contribution_measured") for slot in LIVING)


def test_kept_seeds_and_shapley_values_are_measured_if_that_is_asked_for() -> None:
    config = CROWDED.with_values(env={"counterfactual_every": 1})
    loop = Counted(One, config).run()
    last = loop.steps[-1]
    assert all(last.slots[slot].contribution is not None for slot in (*KEPT, "r0c3"))
    assert last.without_seeds is not None
    assert loop.calls[-1] == 16, "all subsets of four"
    assert loop.grower.env is not None
    assert set(loop.grower.env.backend.final_scores(0).shapley) == {*KEPT, "r0c3"}
