"""Simulated hosts give up what their layers have taken up."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from esper.core.action import Op
from esper.core.stage import SeedStage
from esper.env.planted import PlantedVectorEnv
from esper.env.planted_law import SimParams
from tests.env.planted_helpers import planted


def test_a_merged_seed_that_is_pruned_fades_and_takes_its_gain_along() -> None:
    law = replace(
        SimParams(noise=0.0, paired_noise=0.0),
        at_once=(True,) * 4,
        merges=(True,) * 4,
        synergy=0.0,
        falling_shock=0.0,
    )

    def made() -> PlantedVectorEnv:
        env = planted(1, law=law, env={"merge": True, "at_once": True})
        env.reset(seed=0)
        return env

    def step(env: PlantedVectorEnv, op: Op = Op.WAIT, **heads: Any) -> float:
        """Returns what is gained by seeds, pp."""
        slot = "r0c0" if op is not Op.WAIT else None
        env.step(env.action_spec.encode(op, slot, **heads)[None])
        epoch = env.state.epoch
        accuracy = env.backend.true_accuracies(env.state.slots, epoch).accuracy
        return float((accuracy - law.host_accuracy(epoch, env.horizon))[0])

    env = made()
    for epoch in range(20):
        op = Op.GERMINATE if epoch in (0, 4) else Op.WAIT
        both = step(env, op, blueprint="fern")
    wide = env.offers.widths[0, 0]
    step(env, Op.PRUNE, alpha_speed=5)
    slots = env.state.slots
    assert (slots.stage[0, 0], slots.merges[0, 0]) == (SeedStage.BLENDING, 1)
    assert slots.contribution[0, 0] > 0
    assert slots.merged_parameters[0, 0] == 300
    assert law.width < env.offers.widths[0, 0] < wide
    saved = copy.deepcopy(env.state_dict())
    resumed = made()
    resumed.load_state_dict(saved)
    for host in (env, resumed):
        gains = [step(host) for _ in range(9)]
        assert 0 < gains[-1] < both
        assert step(host, Op.PRUNE, alpha_speed=0) == pytest.approx(0.0)
        assert host.state.slots.merged_parameters.sum() == 0
        assert not host.offers.removable.any()
    assert env.backend.state_dict().keys() == resumed.backend.state_dict().keys()
