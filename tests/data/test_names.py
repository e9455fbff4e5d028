"""Names of tasks are known without loading any."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from esper.config import ConfigError
from esper.data.names import ENV_ONLY, NAMES, require_task
from esper.data.tasks import TASKS


def test_the_names_are_those_of_the_tasks() -> None:
    assert (*TASKS, *ENV_ONLY) == NAMES


def test_a_misspelt_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"'diggits' \(did you mean 'digits'\?\); known: digits, "
    ):
        require_task("diggits")


def test_a_file_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'mine.py:make': mine.py does not exist"):
        require_task("mine.py:make")
    (tmp_path / "mine.py").touch()
    require_task(f"{tmp_path}/mine.py:make")
    require_task("planted")


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "run --help",
        "compare --help",
        "run --rouns 3",
        "run --task diggits",
        "run --controller foo",
        "run --set a.b=3",
        "compare --arm foo --arm none",
    ],
)
def test_help_and_errors_of_usage_do_not_load_torch(arguments: str) -> None:
    code = (
        "import sys\nfrom esper.cli.main import main\nsys.argv = sys.argv[:1] + sys.argv[1:]\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "AssertionError" not in done.stderr, done.stderr
    assert done.returncode == (0 if "--help" in arguments else 2), done.stderr
