"""The folder of a comparison: parts, settings and played rounds."""

from __future__ import annotations

import pytest

from esper.compare.folder import Part
from esper.config import ConfigError


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "1/0", "a/b", "-1/2", "1/2/3"])
def test_a_part_is_named_by_its_number_and_their_number(text: str) -> None:
    assert (Part.parse("2/3"), str(Part.parse("2/3"))) == (Part(2, 3), "part 2/3")
    with pytest.raises(ConfigError, match="give K/N, part K of N"):
        Part.parse(text)
