"""Types of config values: lists of names, and the description of all values."""

import pytest

from esper.config import ConfigError, TrainingConfig
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


@pytest.mark.parametrize("name", ["gpu", "", "cuda:", "cpu,tpu", "cuda:-1", "auto,cpu"])
def test_a_device_has_a_known_name(name: str) -> None:
    for section in ("run", "ppo"):
        with pytest.raises(ConfigError, match=r"unknown device .*cpu, cuda"):
            TrainingConfig.parse({section: {"device": name}})


def test_devices_of_hosts_may_be_several_or_chosen() -> None:
    for names in ("cpu", "cuda", "cuda:0, cuda:1", "auto"):
        assert TrainingConfig.parse({"run": {"device": names}}).run.device == names
    with pytest.raises(ConfigError, match="unknown device 'auto'"):
        TrainingConfig.parse({"ppo": {"device": "auto"}})
