"""`.ci/run` runs its checks and fails if any of them fails, with stand-ins for the commands that it calls."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

COMMANDS = ("pip", "python", "esper", "pytest", "ruff", "clang-format", "mypy", "make")


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the files that the script reads, and stand-ins that record their calls."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "one.cpp").touch()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    shutil.copy(ROOT / "README.md", tmp_path)
    (tmp_path / "bin").mkdir()
    for name in COMMANDS:
        executable(
            tmp_path / "bin" / name,
            f'echo "{name} $*" >> {tmp_path}/calls\n[ "{name} $*" != "$FAILS" ]',
        )
    # `python -m venv FOLDER`: the environment that is entered has the stand-ins.
    executable(
        tmp_path / "python",
        f'mkdir -p "$3/bin"; echo \'export PATH={tmp_path}/bin:$PATH\' > "$3/bin/activate"',
    )
    return tmp_path


def run(tree: Path, fails: str = "") -> tuple[int, list[str]]:
    """The exit status, and the calls of commands."""
    # Nothing else of the caller's: a SLOW_MINUTES would be taken for an argument.
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHON": str(tree / "python"),
        "FAILS": fails,
    }
    done = subprocess.run(
        [tree / ".ci" / "run"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    calls = (tree / "calls").read_text(encoding="utf-8").splitlines()
    (tree / "calls").unlink()
    return done.returncode, calls


CHECKS = [
    "ruff check .",
    "ruff format --check .",
    "mypy --strict esper",
    "clang-format --dry-run -Werror csrc/one.cpp",
    "pytest ",
    "pytest --cores tests/tooling tests/integrations",
    "python build_support/check_wheel.py --torch installed",
    "make docs",
    "make sanitizers PYTHON=python",
    "python tests/mutants/mutate.py --daily 4",
    "make slow PYTHON=python MINUTES=2",
    "esper run --rounds 1 --set run.evaluation_pairs=2",
]


@pytest.mark.finding("M16")
def test_continuous_integration_checks_types_and_lint_and_runs_the_tests(
    tree: Path,
) -> None:
    status, calls = run(tree)
    assert status == 0
    assert [check for check in CHECKS if check not in calls] == []


@pytest.mark.finding("M16")
@pytest.mark.parametrize("check", CHECKS)
def test_continuous_integration_fails_if_a_check_fails_and_does_the_others(
    tree: Path, check: str
) -> None:
    status, calls = run(tree, fails=check)
    assert status != 0
    assert [other for other in CHECKS if other not in calls] == []
