"""Need and gradients in the state of envs and in their events."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from esper.core.stage import SeedStage as S
from esper.telemetry.event import EpochCompleted
from tests.core_helpers import rig

SLOTS = {"slots": ["r0c0", "r2"], "need_every": 2}


def test_vacant_slots_with_a_source_have_a_need_from_the_start() -> None:
    with rig(horizon=6, env=SLOTS) as world:
        need = world.env.state.slots.need[0]
        assert np.isfinite(need).tolist() == [False, True, True]


def test_need_is_measured_every_few_epochs_and_kept_until_then() -> None:
    with rig(horizon=6, env=SLOTS) as world:
        needs = [world.env.state.slots.need[0].copy()]
        for _ in range(4):
            world.step()
            needs.append(world.env.state.slots.need[0].copy())
        same = [np.array_equal(a, b, equal_nan=True) for a, b in pairwise(needs)]
        assert same == [True, False, True, False]


def test_a_slot_with_a_seed_has_no_need() -> None:
    with rig(horizon=6, env={**SLOTS, "at_once": True}) as world:
        world.do("GERMINATE", "r2c1", "widen_half")
        world.step()
        assert np.isfinite(world.env.state.slots.need[0]).tolist() == [
            False,
            True,
            False,
        ]


def test_need_is_not_measured_if_the_config_says_so() -> None:
    with rig(horizon=6, env={**SLOTS, "need_every": 0}) as world:
        world.step()
        world.step()
        assert np.isnan(world.env.state.slots.need).all()
        assert world.of_kind(EpochCompleted)[-1].needs == {}


def test_epochs_tell_need_and_the_gradients_of_host_and_seeds() -> None:
    with rig(horizon=12, env=SLOTS) as world:
        world.grow("r0c0", S.TRAINING)
        world.step()
        event = world.of_kind(EpochCompleted)[-1]
        slots, state = world.env.state.slots, world.env.state
        assert event.needs == {f"r2c{c}": slots.need[0, 1 + c] for c in range(2)}
        assert event.gradients == {
            "host": {
                "norm": state.gradient_norm[0],
                "health": state.gradient_health[0],
                "vanishing": state.vanishing[0],
                "exploding": state.exploding[0],
            },
            "r0c0": {
                "norm": slots.gradient_norm[0, 0],
                "health": slots.gradient_health[0, 0],
                "vanishing": slots.vanishing[0, 0],
                "exploding": slots.exploding[0, 0],
                "ratio": slots.gradient_ratio[0, 0],
            },
        }
        assert event.gradients["host"]["norm"] > 0
        assert math.isfinite(event.gradients["r0c0"]["ratio"])
