from __future__ import annotations

import pytest

from esper.agents.needs import (
    ADVISOR,
    NEEDS,
    WITHOUT_PRICE,
    default_controller,
    with_needs,
    with_price,
)
from esper.agents.spec import NAMES
from esper.config import ConfigError, TrainingConfig
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
    ("blueprints", "widens", "missing", "reason"),
    [
        (None, True, "", ""),
        (["widen_x4"], True, "", ""),
        (["norm"], True, "", "env.blueprints names no widening"),
        (None, False, "classes=", "it finds no layer to widen"),
        (None, True, "classes=", "it needs classes="),
    ],
)
def test_the_advisor_decides_where_it_can_and_the_reason_is_given_where_it_cannot(
    blueprints: list[str] | None, widens: bool, missing: str, reason: str
) -> None:
    config = TrainingConfig().with_values(env={"blueprints": blueprints})
    name, words = default_controller(config, widens, missing)
    assert name == ("heuristic" if reason else ADVISOR)
    assert words.endswith(reason)
    assert bool(words) == bool(reason)


@pytest.mark.parametrize("name", WITHOUT_PRICE)
def test_a_price_that_a_rule_does_not_read_is_refused(name: str) -> None:
    assert name in NAMES
    config = TrainingConfig()
    with pytest.raises(ConfigError, match=f"no effect on controller {name}, which"):
        with_price(config, 2.0, name)
    assert with_price(config, None, name) is config


@pytest.mark.parametrize("name", [ADVISOR, "pretrained", "mine.py:decide"])
def test_a_price_is_that_of_the_reward(name: str) -> None:
    reward = with_price(TrainingConfig(), 2.0, name).reward
    assert (reward.mode, reward.price) == ("priced", 2.0)
