"""The question that helps with a misspelt name."""

from __future__ import annotations

from esper.errors import did_you_mean


def test_the_most_similar_name_is_suggested() -> None:
    assert (
        did_you_mean("heurstic", ("heuristic", "random", "none"))
        == " (did you mean 'heuristic'?)"
    )


def test_nothing_is_suggested_if_no_name_is_similar() -> None:
    assert did_you_mean("xyz", ("heuristic", "random", "none")) == ""
