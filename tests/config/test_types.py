"""Types of config values: lists of names, and the description of all values."""

import pytest

from esper.config import TrainingConfig
from tests.core_helpers import tiny_config


@pytest.mark.parametrize(
    ("text", "names"), [("norm", ("norm",)), ("norm, lora", ("norm", "lora")), ("", ())]
)
def test_names_may_be_given_as_one_string_on_the_command_line(
    text: str, names: tuple[str, ...]
) -> None:
    assert TrainingConfig.parse({"env": {"blueprints": text}}).env.blueprints == names


def test_the_other_lists_of_names_may_be_given_as_one_string_too() -> None:
    config = tiny_config(
        env={"stop_on": "plateau,divergence", "auto_advance": "G1"}
    ).env
    assert (config.stop_on, config.auto_advance) == ({"plateau", "divergence"}, {"G1"})
