"""Names of tasks are known without loading any."""

from __future__ import annotations

import subprocess
import sys

import pytest

from esper.config import ConfigError
from esper.data.names import NAMES, SIMULATED, require_task
from esper.data.tasks import TASKS


def test_the_names_are_those_of_the_tasks() -> None:
    assert (*TASKS, *SIMULATED) == NAMES


def test_a_misspelt_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"'diggits' \(did you mean 'digits'\?\); known: digits, "
    ):
        require_task("diggits")


def test_names_of_files_are_left_alone() -> None:
    require_task("mine.py:make")
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
        "compare --arm no-growth --arm heuristic",
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
