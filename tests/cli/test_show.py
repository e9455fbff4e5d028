"""`esper show`: the status of a run in plain lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.run.run_helpers import play, tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    play(tiny(), folder)
    return folder


def test_show_prints_plain_lines_into_a_pipe(esper: Any, run: Path) -> None:
    found = esper("show", str(run))
    assert found.code == 0
    assert "finished: 1 round played and compared" in found.out
    assert "\x1b" not in found.out
    assert not [line for line in found.out.splitlines() if line != line.rstrip()]
    assert esper("show", str(run), "--watch").out == found.out
