"""The table of known tasks."""

import pytest

from esper.config import ConfigError
from esper.data.tasks import load_task


def test_an_unknown_task_lists_the_known_ones() -> None:
    wanted = r"unknown task 'digit' \(did you mean 'digits'\?\); known: .*digits"
    with pytest.raises(ConfigError, match=wanted):
        load_task("digit")
