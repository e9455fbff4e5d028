"""Sections of the configuration about trackers and warnings."""

from __future__ import annotations

from typing import Any

import pytest

from esper.config import TrainingConfig


@pytest.mark.parametrize(
    "given", ["tensorboard,wandb", ["tensorboard", "wandb", "tensorboard"]]
)
def test_names_may_be_given_in_one_string(given: Any) -> None:
    config = TrainingConfig.parse({"track": {"to": given}})
    assert config.track.to == ("tensorboard", "wandb")
    assert TrainingConfig.parse(config.model_dump(mode="json")) == config
