"""The table of known tasks, and the names of earlier versions."""

import pytest

from esper.config import ConfigError
from esper.data.names import REMOVED
from esper.data.tasks import build_host, load_task
from esper.hosts.cnn import CNNHost


def test_an_unknown_task_lists_the_known_ones() -> None:
    wanted = r"unknown task 'digit' \(did you mean 'digits'\?\); known: .*digits"
    with pytest.raises(ConfigError, match=wanted):
        load_task("digit")


def test_a_removed_task_is_refused_with_what_gives_the_same() -> None:
    wanted = {
        "cifar10_scale": 99_922,
        "cifar10_impaired": 77,
        "cifar10_minimal": 164,
        "cifar10_wide": 94_762,
    }
    assert wanted.keys() == REMOVED.keys()
    for name, parameters in wanted.items():
        with pytest.raises(ConfigError, match="no longer included") as caught:
            build_host(name)
        assert REMOVED[name] in str(caught.value)
        host = eval(REMOVED[name], {"CNNHost": CNNHost})
        assert host.parameter_count == parameters
