"""Commands of the rehearsal: each has a limit, a log, and a result that can be read."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

TIMED_OUT, NOT_PLANTED = -101, -102
"""Values in place of an exit status, which is negative after a signal."""


@dataclass
class Result:
    """Result of a command.

    ``status`` is its exit status, TIMED_OUT after its limit, NOT_PLANTED for a fault that did not fit; ``tests`` are
    outcomes by test, with the reason of each that did not pass.
    """

    name: str
    status: int
    seconds: float
    log: Path
    tests: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether it ended well, with no test that failed."""
        return self.status == 0 and not self.failed

    @property
    def failed(self) -> list[str]:
        return [
            name
            for name, outcome in self.tests.items()
            if outcome.startswith(("failed", "error"))
        ]

    @property
    def skipped(self) -> dict[str, str]:
        """Reasons by test."""
        start = "skipped: "
        return {
            name: said.removeprefix(start)
            for name, said in self.tests.items()
            if said.startswith(start)
        }

    @property
    def last_line(self) -> str:
        lines = [
            line
            for line in self.log.read_text(errors="replace").splitlines()
            if line.strip()
        ]
        return lines[-1] if lines else ""


def joined(name: str, parts: list[Result]) -> Result:
    """Parts of one step as one: with the status of the first part that failed, and the seconds of all."""
    status = next((part.status for part in parts if part.status != 0), 0)
    tests = {test: outcome for part in parts for test, outcome in part.tests.items()}
    return Result(
        name, status, sum(part.seconds for part in parts), parts[0].log, tests
    )


def run(
    name: str,
    command: list[str],
    *,
    folder: Path,
    log: Path,
    limit: float,
    environment: Mapping[str, str],
) -> Result:
    """Run ``command`` in ``folder``, with output to ``log``; after ``limit`` seconds it gets SIGINT, then SIGKILL."""
    begin = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=_heed_interrupts,
        )
        try:
            status = process.wait(limit)
        except BaseException as error:
            _stop(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            status = TIMED_OUT
    return Result(name, status, time.monotonic() - begin, log)


def _heed_interrupts() -> None:
    """Undoes the ignoring of SIGINT that a background job of a shell inherits."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGINT makes pytest say where it was."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def outcomes(report: Path) -> dict[str, str]:
    """Outcomes by test from pytest's JUnit XML; empty if there is no report."""
    if not report.is_file():
        return {}
    return {
        _name(case): _outcome(case)
        for case in ElementTree.parse(report).iter("testcase")
    }


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').rsplit('.', 1)[-1]}.py::{case.get('name')}"


def _outcome(case: ElementTree.Element) -> str:
    for kind, word in (
        ("failure", "failed"),
        ("error", "error"),
        ("skipped", "skipped"),
    ):
        found = case.find(kind)
        if found is not None:
            return f"{word}: {' '.join((found.get('message') or '').split())[:200]}"
    return "passed"
