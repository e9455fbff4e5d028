"""Names of slots and blueprints that a config chooses."""

from __future__ import annotations

import pytest

from esper.config import ConfigError
from esper.core.chosen import choose_blueprints, choose_slots

SLOTS = ("r0c0", "r0c1", "r1c0", "r10c1")


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["all"], {*SLOTS}),
        (["r0"], {"r0c0", "r0c1"}),
        (["r1"], {"r1c0"}),
        (["c1", "r1c0"], {"r0c1", "r10c1", "r1c0"}),
    ],
)
def test_a_name_stands_for_slots(names: list[str], chosen: set[str]) -> None:
    assert choose_slots(names, SLOTS) == chosen


@pytest.mark.parametrize("names", [[], ["r2"], ["r0c0", "r0c"], ["ALL"]])
def test_other_names_are_refused_with_the_slots(names: list[str]) -> None:
    with pytest.raises(ConfigError, match="possible: r0c0, r0c1, r1c0, r10c1"):
        choose_slots(names, SLOTS)


def test_blueprints_are_those_named_or_the_default() -> None:
    assert choose_blueprints(None, ("a", "b"), "here") == ("a", "b")
    assert choose_blueprints(("b",), ("a", "b"), "here") == ("b",)
    assert choose_blueprints(None, ("a", "b"), "here", default=("a",)) == ("a",)
    assert choose_blueprints(("b",), ("a", "b"), "here", default=("a",)) == ("b",)
    with pytest.raises(ConfigError, match="unknown 'c'; known for here: a, b"):
        choose_blueprints(("c",), ("a", "b"), "here")
