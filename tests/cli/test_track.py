"""`esper run --track`: trackers that also show a run."""

from __future__ import annotations

from typing import Any

import pytest

from esper.config import TrainingConfig, read_toml
from tests.cli.conftest import SIMULATED, Esper

RUN = (*SIMULATED, "--controller", "none", "--rounds", "1", "--out", "mine")


def test_a_run_is_shown_in_tensorboard(esper: Esper, tmp_path: Any) -> None:
    found = esper("run", *RUN, "--track", "tensorboard")
    assert found.code == 0
    assert found.err == ""
    assert "Telemetry lost" not in found.out
    assert list((tmp_path / "mine" / "tensorboard").glob("events.out.tfevents.*"))
    assert TrainingConfig.parse(
        read_toml(tmp_path / "mine" / "config.toml")
    ).track.to == ("tensorboard",)


@pytest.mark.parametrize(
    "given",
    [
        ("--track", "sacred"),
        ("--set", "track.to=sacred"),
        ("--track", "tensorboard", "--track", "sacred"),
    ],
)
def test_an_unknown_tracker_is_refused_with_those_that_are_known(
    given: tuple[str, ...], esper: Esper
) -> None:
    found = esper("run", *RUN, *given)
    assert found.code == 2
    for name in ("track.to", "'tensorboard', 'wandb' or 'trackio'", "sacred"):
        assert name in found.err
