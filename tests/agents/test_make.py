"""All controllers by name: the same env for each, fed by observation and mask alone."""

import numpy as np
import pytest

from esper.agents.controller import PerEnvController
from esper.agents.make import make_controller
from esper.config import ConfigError
from tests.agents.control_helpers import LAYOUT, SPEC, run
from tests.env.planted_helpers import planted


def test_a_controller_is_made_by_its_name_and_an_unknown_name_lists_the_known() -> None:
    for name in ("heuristic", "plateau", "random", "none"):
        assert isinstance(
            make_controller(name, "digits", SPEC, LAYOUT, 1, 0), PerEnvController
        )
    for name in ("schedule:", "ppo", "Random"):
        with pytest.raises(
            ConfigError,
            match="heuristic, plateau, need, random, none, schedule",
        ):
            make_controller(name, "digits", SPEC, LAYOUT, 1, 0)


@pytest.mark.trap(27)
@pytest.mark.parametrize("name", ["random", "heuristic", "plateau", "none", "schedule"])
def test_decisions_use_only_observation_and_mask(name: str) -> None:
    """A second controller without the env decides the same from observations and masks alone."""
    env = planted(2, horizon=30)
    first, second = (
        make_controller(name, "planted", env.action_spec, env.layout, 2, 7)
        for _ in range(2)
    )
    seen = run(env, first, 30)
    second.begin()
    for observation, masks, actions in seen:
        np.testing.assert_array_equal(second.act(observation, masks), actions)
