"""Run folders: logs are cut back to the checkpoint, and what is missing from them is reported."""

from __future__ import annotations

import shutil
from pathlib import Path

from esper.files.run_folder import RunFolder
from tests.recorded import Recorded


def test_logs_are_cut_to_the_checkpoint_and_what_they_lack_is_reported(
    recorded: Recorded, tmp_path: Path
) -> None:
    shutil.copytree(recorded.grown, tmp_path / "r")
    folder = RunFolder(tmp_path / "r", resumed=True)
    wanted = {"events.jsonl": 1000, "metrics.csv": 10**6}
    (said,) = folder.cut_logs(wanted)
    assert "metrics.csv is missing its last" in said
    assert folder.log_sizes()["events.jsonl"] == 1000
