"""Reports of the steps of a Grower."""

from __future__ import annotations

from esper.lifecycle.stage import SeedStage
from tests.grower.loops import (
    Loop,
    stages,
)


def test_stages_are_the_lifecycles() -> None:
    """Names in reports are those of the lifecycle."""
    loop = Loop().run()
    assert set(stages(loop)) <= {stage.name for stage in SeedStage}
