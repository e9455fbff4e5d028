"""All controllers by name: the same env for each, fed by observation and mask alone."""

from typing import Any

import numpy as np
import pytest

from esper.agents.controller import PerEnvController
from esper.agents.make import make_controller
from esper.config import ConfigError
from tests.agents.control_helpers import LAYOUT, SPEC, run
from tests.core_helpers import rig
from tests.selection import slow_except


def test_a_controller_is_made_by_its_name_and_an_unknown_name_lists_the_known() -> None:
    for name in ("heuristic", "plateau", "random", "none"):
        assert isinstance(
            make_controller(name, "digits", SPEC, LAYOUT, 1, 0), PerEnvController
        )
    for name in ("schedule:", "ppo", "Random"):
        with pytest.raises(
            ConfigError,
            match="plans, heuristic, plateau, random, none, plans:RUN, schedule",
        ):
            make_controller(name, "digits", SPEC, LAYOUT, 1, 0)


@pytest.mark.finding("M2")
def test_every_controller_plays_the_same_env_which_does_not_depend_on_who_played_before() -> (
    None
):
    """All controllers play one env, which gives the same results for the same actions."""
    with rig(n_envs=2, horizon=3, env={"slots": ["all"]}) as world:
        spec, layout = world.env.action_spec, world.env.layout

        def play(name: str) -> list[tuple[Any, Any, Any]]:
            world.reset(seed=4)
            controller = make_controller(name, "digits", spec, layout, 2, 7)
            controller.begin()
            seen = []
            for _ in range(3):
                actions = controller.act(world.observation, world.info["action_mask"])
                seen.append((world.observation, world.info["action_mask"], actions))
                world.step(dict(enumerate(actions)))
            return seen

        first = play("none")
        for name in ("random", "heuristic", "schedule"):
            observation, masks, _ = play(name)[0]
            np.testing.assert_array_equal(observation, first[0][0])
            assert all(
                np.array_equal(masks[head], mask) for head, mask in first[0][1].items()
            )
            for again, once in zip(play("none"), first, strict=True):
                np.testing.assert_array_equal(again[0], once[0])


@pytest.mark.trap(27)
@pytest.mark.parametrize(
    "name",
    slow_except(
        ["random", "heuristic"], ["random", "heuristic", "plateau", "none", "schedule"]
    ),
)
def test_decisions_use_only_observation_and_mask(name: str) -> None:
    """A second controller without the env decides the same from observations and masks alone."""
    sizes = {"task": {"samples_per_epoch": 256}, "env": {"slots": ["all"]}}
    with rig(n_envs=2, horizon=15, **sizes) as world:
        spec, layout = world.env.action_spec, world.env.layout
        first, second = (
            make_controller(name, "digits", spec, layout, 2, 7) for _ in range(2)
        )
        seen = run(world, first, 15)
    second.begin()
    for observation, masks, actions in seen:
        np.testing.assert_array_equal(second.act(observation, masks), actions)
