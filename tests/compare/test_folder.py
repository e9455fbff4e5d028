"""The folder of a comparison: its settings and its rounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from esper.compare.folder import FORMAT, SETTINGS, ComparisonFolder
from esper.config import ConfigError


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"format": FORMAT, "part": [1, 4]}, "parts are no longer played: torchrun"),
        (
            {"format": 0},
            f"has format 0, but this version of Esper reads format {FORMAT}",
        ),
        ([], "is not the folder of a comparison"),
    ],
    ids=["a part", "another format", "no folder"],
)
def test_folders_that_cannot_be_continued_are_refused(
    saved: object, message: str, tmp_path: Path
) -> None:
    if saved:
        (tmp_path / SETTINGS).write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=message):
        ComparisonFolder(tmp_path).read()


def test_whole_comparisons_of_versions_with_parts_are_read(tmp_path: Path) -> None:
    saved = {"format": FORMAT, "part": [1, 1], "pairs": 3}
    (tmp_path / SETTINGS).write_text(json.dumps(saved))
    assert ComparisonFolder(tmp_path).read() == saved
