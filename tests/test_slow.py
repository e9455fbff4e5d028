"""`--minutes` bounds how long tests are started."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("minutes", "result"), [("0", "3 skipped"), ("5", "3 passed"), ("0.02", "1 passed, 2 skipped")]
)
def test_no_test_is_started_after_the_minutes_have_passed(minutes: str, result: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import time, pytest\n"
        "@pytest.mark.parametrize('number', range(3))\n"
        f"def test_it(number):\n    time.sleep({1.3 if minutes == '0.02' else 0})\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--minutes", minutes, "."]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1].startswith(result)
    assert (f"not started: {minutes} minutes have passed" in found.stdout) == ("skipped" in result)
