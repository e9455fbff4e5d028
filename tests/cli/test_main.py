"""The command group `esper`: help, its commands, and its version."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper import __version__
from tests.cli.input_helpers import Esper, refused


def test_help_does_not_import_torch() -> None:
    script = (
        "import sys\n"
        "from esper.cli.main import group\n"
        "group(['--help'], standalone_mode=False)\n"
        "print('heavy:', [name for name in ('torch', 'scipy', 'sklearn', 'gymnasium') if name in sys.modules])\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.endswith("heavy: []\n")
    assert "compare" in found.stdout


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (
            "run",
            "--task --envs --episode-length --seed --device --config --set --controller --rounds --out --track "
            "--resume",
        ),
        (
            "compare",
            "--task --envs --episode-length --seed --device --config --set --arm --pairs --reference --json --of --out "
            "--resume",
        ),
        ("report", "--out"),
        ("show", "--watch"),
        ("info", "--observation --config --task"),
        ("tasks", "--help"),
    ],
)
def test_help_of_a_command_names_its_options(esper: Callable[..., Any], command: str, options: str) -> None:
    for flag in ("-h", "--help"):
        found = esper(command, flag)
        assert found.code == 0
        assert set(options.split()) <= set(found.out.split())


def test_unknown_commands_are_refused(esper: Esper) -> None:
    refused(esper, ("grow",), "grow", "demo, run, compare")
    refused(esper, ("reprot", "runs/a"), "no command 'reprot' (did you mean 'report'?)")


def test_the_module_is_the_command(tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, "-m", "esper.cli.main", "tasks"], capture_output=True, text=True)
    assert found.returncode == 0
    assert "digits" in found.stdout


def test_the_version_is_that_of_the_package(esper: Esper) -> None:
    """It is read from the package, not from the metadata of an installed distribution."""
    found = esper("--version")
    assert (found.code, found.out) == (0, f"esper, version {__version__}\n")
