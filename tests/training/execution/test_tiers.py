"""Execution tiers: the lanes and the tier that a config gets."""

from __future__ import annotations

import pytest

from esper.config import ConfigError, TrainingConfig
from tests.core_helpers import rig


def test_graph_is_refused_on_a_cpu_and_the_others_named() -> None:
    with pytest.raises(ConfigError, match="it can be auto, eager or compiled"), rig(1, 8, run={"tier": "graph"}):
        pass
    with pytest.raises(ConfigError, match="'auto', 'eager', 'compiled' or 'graph'"):
        TrainingConfig.parse({"run": {"tier": "fast"}})
