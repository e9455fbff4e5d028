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
        (
            {"format": 0},
            f"has format 0, but this version of Esper reads format {FORMAT}",
        ),
        ([], "is not the folder of a comparison"),
    ],
    ids=["another format", "no folder"],
)
def test_folders_that_cannot_be_continued_are_refused(
    saved: object, message: str, tmp_path: Path
) -> None:
    if saved:
        (tmp_path / SETTINGS).write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match=message):
        ComparisonFolder(tmp_path).read()
