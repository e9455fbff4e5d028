from __future__ import annotations

from esper.exam.facts import facts_of
from tests.exam.test_context import IMAGES


def test_facts_have_the_parameters_of_every_width() -> None:
    facts = facts_of(IMAGES)
    assert facts.parameters == {1: 277, **{f: IMAGES.parameters(f) for f in (2, 4, 8)}}
    assert facts.updates == 60 // 32 * 4
    assert facts.convolutional
    assert facts.inputs == 64
