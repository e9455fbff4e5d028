from __future__ import annotations

import pytest

from esper.agents.needs import ADVISOR, NEEDS, default_controller, with_needs
from esper.config import TrainingConfig
from esper.core.sizing import WIDENINGS


def test_the_advisor_gets_what_it_needs_in_the_place_of_defaults() -> None:
    config = with_needs(ADVISOR, TrainingConfig())
    assert config.env.blueprints == tuple(WIDENINGS.values())
    assert config.env.at_once is True
    assert config.env.merge is True
    assert config.reward.mode == "priced"


def test_what_a_user_has_set_stays() -> None:
    config = TrainingConfig().with_values(
        env={"blueprints": ["widen_whole"], "parameter_budget": 5.0, "merge": False}
    )
    needed = with_needs(ADVISOR, config)
    assert needed.env.blueprints == ("widen_whole",)
    assert needed.env.parameter_budget == 5.0
    assert needed.env.merge is False
    assert needed.env.edits_per_epoch == NEEDS[ADVISOR]["env"]["edits_per_epoch"]


def test_needs_are_given_once() -> None:
    config = with_needs(ADVISOR, TrainingConfig())
    assert with_needs(ADVISOR, config) == config


def test_other_controllers_need_nothing() -> None:
    config = TrainingConfig()
    assert with_needs("heuristic", config) is config
    assert with_needs(lambda env: env, config) is config


@pytest.mark.parametrize(
    ("blueprints", "widens", "told", "controller"),
    [
        (None, True, True, ADVISOR),
        (["widen_x4"], True, True, ADVISOR),
        (["norm"], True, True, "heuristic"),
        (None, False, True, "heuristic"),
        (None, True, False, "heuristic"),
    ],
)
def test_the_advisor_decides_where_it_can(
    blueprints: list[str] | None, widens: bool, told: bool, controller: str
) -> None:
    config = TrainingConfig().with_values(env={"blueprints": blueprints})
    assert default_controller(config, widens, told) == controller
