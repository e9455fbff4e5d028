"""The view of one env, and the controllers that never grow or act at random."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from esper.agents.controller import (
    EnvView,
    NoGrowth,
    PerEnvController,
    RandomController,
)
from esper.agents.heuristic import HeuristicController, PlateauController
from esper.config import TrainingConfig
from esper.core.action import HEADS, RELEVANT, Op
from esper.env.planted_law import SimParams
from esper.run.rollout import EpisodeStats, play_round
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


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (
            lambda view: view.value("accuracy_slop_3"),
            "no observation 'accuracy_slop_3' (did you mean 'accuracy_slope_3'?); `esper info --observation` lists",
        ),
        (
            lambda view: view.slot("r0c1", "contribtion"),
            "no observation 'r0c1/contribtion' (did you mean 'r0c1/contribution'?)",
        ),
        (
            lambda view: view.choice("r0c0", "norm", "params"),
            "no observation 'r0c0/norm/params'",
        ),
        (lambda view: view.stage("r9c9"), "no observation 'r9c9/stage_"),
        (
            lambda view: view.legal(Op.WAIT, "r9c9"),
            "slot 'r9c9' is not one of: r0c0, r0c1",
        ),
        (
            lambda view: view.legal(Op.GERMINATE, "r0c0", "moss"),
            "blueprint 'moss' is not one of: norm",
        ),
    ],
)
def test_a_view_names_the_most_similar_of_the_known_names(
    read: Callable[[EnvView], object], words: str
) -> None:
    world = World()
    masks = {name: mask[0] for name, mask in world.masks().items()}
    view = EnvView(
        SPEC, LAYOUT, one_observation(LAYOUT, world.base, world.slots), masks
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        read(view)


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


RULES = {
    "heuristic": HeuristicController,
    "plateau": PlateauController,
}


def played(
    rule: type[PerEnvController], edits: int, law: SimParams | None = None
) -> EpisodeStats:
    config = {"env": {"edits_per_epoch": edits}, "plateau": {"margin": 50.0}}
    env = planted(4, 30, law, **config)
    parsed = TrainingConfig.parse(config)
    return play_round(env, rule(env.action_spec, env.layout, 4, config=parsed), seed=0)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_decides_once_before_an_epoch(name: str) -> None:
    one, several = played(RULES[name], 1), played(RULES[name], 8)
    assert one.fossils.any()
    np.testing.assert_array_equal(several.committed, one.committed)
    np.testing.assert_allclose(several.returns, one.returns, rtol=1e-12)


@pytest.mark.parametrize("name", ["heuristic"])
def test_a_rule_plants_all_seeds_that_have_no_stages_before_the_first_epoch(
    name: str,
) -> None:
    law = SimParams(at_once=(True,) * 4, worth=((5.0, 5.0, 5.0, 5.0),) * 3)
    births: dict[int, list[int]] = {}

    class Noted(RULES[name]):  # type: ignore[misc]
        def choose(self, env: int, view: EnvView) -> np.ndarray:
            action = super().choose(env, view)
            if action[0] == Op.GERMINATE:
                births.setdefault(env, []).append(view.epoch)
            return action  # type: ignore[no-any-return]

    played(Noted, 8, law)
    assert {epoch for epochs in births.values() for epoch in epochs} == {0}
    assert max(map(len, births.values())) == 3
