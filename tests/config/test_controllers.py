"""Sections of the configuration about what is learned."""

import pytest

from esper.config import ConfigError, TrainingConfig


def test_shares_that_leave_nothing_to_each_blueprint_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"shared \+ by_blueprint \+ by_slot must be 0.95 or less"
    ):
        TrainingConfig.parse(
            {"experience": {"shared": 0.5, "by_blueprint": 0.5, "by_slot": 0.1}}
        )
