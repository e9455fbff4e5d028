"""The random controller: legal, and independent between envs."""

import numpy as np

from esper.agents.controller import RandomController
from esper.spaces.action import HEADS, RELEVANT, Op
from tests.agents.control_helpers import LAYOUT, SPEC, World, run
from tests.env.planted_helpers import planted
from tests.spaces.spaces_helpers import one_observation


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
