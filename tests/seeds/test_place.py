"""The places of seeds."""

from __future__ import annotations

from torch import nn

from esper.seeds.place import Place


def test_places_are_compared_by_name_width_and_source() -> None:
    assert Place("r0c0", 3, True, (nn.Linear(2, 3),)) == Place("r0c0", 3, True)
    assert Place("r0c0", 3) != Place("r0c0", 4)
    assert Place("r0c0", 3) != Place("r0c0", 3, True)
