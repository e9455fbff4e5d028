"""The table of known tasks, and tasks in a file of the user."""

import pytest

from esper.config import ConfigError
from esper.data.tasks import load_task


def test_an_unknown_task_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown task 'digit' \(did you mean 'digits'\?\); known: .*digits",
    ):
        load_task("digit")
