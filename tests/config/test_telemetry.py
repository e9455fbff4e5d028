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


def test_values_of_queues_are_ignored_and_those_that_were_set_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Run folders and policies of earlier versions have them."""
    old = {"project": "esper", "queue": 5, "patience": 10.0}
    assert TrainingConfig.parse({"track": old}) == TrainingConfig()
    (said,) = caplog.messages
    assert "track.queue is ignored" in said
