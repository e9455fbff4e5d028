"""The command as a person types it, in this process: `main()` with its exit codes and what it printed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from esper.cli.main import main


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str


Esper = Callable[..., Finished]


@pytest.fixture
def esper(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Esper:
    """``esper("run", "--envs", "2")`` in an empty working directory; an exception that leaves main() fails the test."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Finished:
        monkeypatch.setattr(sys, "argv", ["esper", *arguments])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        return Finished(code, printed.out, printed.err)

    return call
