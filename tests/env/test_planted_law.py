"""The law of the planted task: the host alone, worths of seeds, and shocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from esper.agents.controller import NoGrowth
from esper.core.action import Op
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import SimParams
from tests.env.planted_helpers import life, planted, play

QUIET = SimParams(noise=0.0, paired_noise=0.0)


def test_a_host_alone_follows_the_baseline() -> None:
    env = planted(2, law=QUIET)
    assert env.horizon == 50
    for epoch, (_, _, info) in enumerate(
        play(env, NoGrowth(env.action_spec, env.layout, 2))
    ):
        curve = 10 + 55 * (
            1 - np.exp(-epoch / 10)
        )  # floor, ceiling − floor, host_time · T
        np.testing.assert_allclose(info["validation_accuracy"], curve)
        np.testing.assert_allclose(info["baseline_accuracy"], curve)


def grown(env: PlantedVectorEnv, rows: dict[int, NDArray[np.int64]]) -> float:
    """Final committed accuracy above the baseline of one env that takes these actions at these epochs, pp."""
    env.reset(seed=0)
    for epoch in range(env.horizon):
        info = env.step(rows.get(epoch, env.action_spec.encode(Op.WAIT))[None])[4]
    return float((info["committed_accuracy"] - info["baseline_accuracy"])[0])


def test_the_law_rewards_the_right_blueprint_early() -> None:
    # Trials have errors, so that the gate can tolerate any of them; committed accuracy has none.
    env = planted(
        1,
        law=replace(QUIET, paired_noise=0.3),
        env={"gates": {"trial_standard_errors": 1000.0}},
    )
    fern, moss, oak = (
        grown(env, life(env, 0, name)) for name in ("fern", "moss", "oak")
    )
    assert fern > moss > 0 > oak
    assert fern > grown(env, life(env, 10, "fern")) > grown(env, life(env, 25, "fern"))
    assert fern > grown(env, life(env, 0, "fern", style="GATED_GATE")) > moss


def test_blending_too_early_and_pruning_in_a_jump_hurt() -> None:
    patient, hasty = (
        planted(1, law=replace(QUIET, worth=((0.0,) * 4,) * 3, rising_shock=r))
        for r in (0.0, 9.0)
    )
    assert grown(patient, life(patient, 0, "fern")) == pytest.approx(0.0)
    early, late = (
        grown(hasty, life(hasty, 0, "fern", incubation)) for incubation in (4, 12)
    )
    assert early < late < 0
    env = planted(1, law=QUIET)
    kept = life(env, 0, "fern")
    *_, fossilized = kept
    prune = {
        speed: {
            **kept,
            fossilized: env.action_spec.encode(Op.PRUNE, "r0c0", alpha_speed=speed),
        }
        for speed in (0, 8)
    }
    assert grown(env, prune[0]) < grown(env, prune[8]) < 0


QUIET = SimParams(noise=0.0, paired_noise=0.0)


def test_a_law_can_follow_a_measured_curve() -> None:
    law = replace(QUIET, curve=(10.0, 40.0, 55.0))
    np.testing.assert_array_equal(law.host_accuracy(np.array([2, 0]), 2), [55.0, 10.0])
    assert law.baseline(2, 1).accuracy == (10.0, 40.0, 55.0)


def test_a_merged_seed_adds_what_it_would_and_later_ones_in_its_slot_add_less() -> None:
    law = replace(QUIET, at_once=(True,) * 4, merges=(True,) * 4, synergy=0.0)
    gains = []
    for merge, epochs in (
        (False, (0,)),
        (True, (0,)),
        (True, (0, 1)),
        (True, (0, 1, 2)),
    ):
        env = planted(1, law=law, env={"merge": merge, "at_once": True})
        plant = env.action_spec.encode(Op.GERMINATE, "r0c0", "fern")
        gains.append(grown(env, dict.fromkeys(epochs, plant)))
        assert env.state.slots.merges.sum() == merge * len(epochs)
        assert not env.backend.scar.any()
    beside, one, two, three = gains
    assert one == pytest.approx(beside)
    assert 0 < three - two < two - one < one
    assert env.state.slots.added_parameters[0] == 3 * 300
