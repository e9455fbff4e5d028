"""The view of one env, and the controllers that never grow or act at random."""

from __future__ import annotations

import numpy as np
import pytest

from esper.agents.controller import EnvView, NoGrowth, RandomController
from esper.core.action import HEADS, RELEVANT, Op
from tests.agents.control_helpers import LAYOUT, SPEC, S, World, run
from tests.core.spaces_helpers import one_observation
from tests.env.planted_helpers import planted


def test_a_view_reads_the_observation_by_name() -> None:
    world = World()
    world.put("r0c1", S.HOLDING, age=37, blueprint=2.0, contribution=0.3)
    masks = {name: mask[0] for name, mask in world.masks().items()}
    view = EnvView(
        SPEC, LAYOUT, one_observation(LAYOUT, world.base, world.slots), masks
    )
    assert (view.epoch, view.age("r0c1"), view.stage("r0c1")) == (10, 37, S.HOLDING)
    assert (view.blueprint("r0c1"), view.blueprint("r0c0")) == ("conv_light", None)
    assert view.slot("r0c1", "contribution") == pytest.approx(0.3)
    assert view.legal(Op.FOSSILIZE, "r0c1")
    assert not view.legal(Op.FOSSILIZE, "r0c0")
    assert view.legal(Op.GERMINATE, "r0c0", "norm")
    assert not view.legal(Op.GERMINATE, "r0c1", "norm")


def test_no_growth_waits() -> None:
    world, controller = World(), NoGrowth(SPEC, LAYOUT, 1)
    world.put("r0c0", S.HOLDING, gate_passed=1.0, contribution=1.0)
    controller.begin()
    assert world.ask(controller)[0] == "WAIT"


def test_random_play_is_legal_for_hundreds_of_steps_and_tries_every_op() -> None:
    gates = {"trial_standard_errors": 1000.0, "min_training_epochs": 1}
    env = planted(8, horizon=50, env={"gates": gates})
    seen = run(env, RandomController(env.action_spec, env.layout, 8, run_seed=1), 150)
    ops = {Op(int(op)) for _, _, actions in seen for op in actions[:, 0]}
    assert ops == set(Op)
    for row in np.concatenate([actions for _, _, actions in seen]):
        relevant = ("op", *RELEVANT[Op(int(row[0]))])
        assert all(
            head in relevant or value == 0
            for head, value in zip(HEADS, row, strict=True)
        )


def test_random_draws_of_an_env_do_not_depend_on_the_others() -> None:
    world = World()
    observation, masks = (
        one_observation(LAYOUT, world.base, world.slots)[None],
        world.masks(),
    )
    one, three = (
        RandomController(SPEC, LAYOUT, 1, 3),
        RandomController(SPEC, LAYOUT, 3, 3),
    )
    one.begin()
    three.begin()
    tripled = {name: np.repeat(mask, 3, axis=0) for name, mask in masks.items()}
    rows = []
    for _ in range(20):
        alone, among = (
            one.act(observation, masks),
            three.act(np.repeat(observation, 3, axis=0), tripled),
        )
        assert np.array_equal(alone[0], among[0])
        rows.append(among)
    assert any(not np.array_equal(row[0], row[1]) for row in rows)
    assert any(not np.array_equal(rows[0][0], row[0]) for row in rows)
