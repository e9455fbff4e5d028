"""Run the steps of a plan, each in processes of its own and within its time, and judge what each one showed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
SKIP = 77  # the exit status of a command that cannot run here, as in automake; its last line is the reason
GRACE = 5.0  # seconds between SIGINT and SIGKILL, in which pytest writes its report
PATIENCE = (
    3  # times its own limit that a step may take if earlier ones have saved as much
)
SHORTEST = 1.0  # a step with less time than this is not started

# A line of verbose pytest: the test, and its outcome unless the test is still running. A dump of a timeout or of a
# crash may follow on the line of the test; then the outcome stands at the start of a later line.
_OUTCOME = r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b(.*)"
_TEST = re.compile(rf"^(?:(\S+\.py::.+?)(?:\s+{_OUTCOME})?|{_OUTCOME})$", re.MULTILINE)
_DUMP = re.compile(r"\s*(?:Timeout \(|Fatal Python error).*")
# What compute-sanitizer says of a GPU that it cannot watch, and of a program that it never got hold of.
UNSUPPORTED = re.compile(r"Device not supported")
UNWATCHED = re.compile(
    r"Target application terminated before first instrumented API call|No attachable process found"
)
_REPORT = re.compile(r"^=+ ((?:RACECHECK|ERROR) SUMMARY: .*)$", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """A command with a limit.

    ``tests`` says that the command is pytest, ``sanitizer`` that it runs under compute-sanitizer. A step is skipped
    unless all steps that it ``needs`` are ok.
    """

    name: str
    limit: float  # seconds
    command: Sequence[str]
    needs: tuple[str, ...] = ()
    tests: bool = False
    sanitizer: bool = False
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Result:
    """Outcome of one step; the counts are None unless the step ran tests."""

    step: str
    status: str  # "ok", "failed" or "skipped"
    seconds: float
    says: str
    passed: int | None = None
    failed: int | None = None
    skipped: int | None = None


class Stopped(BaseException):
    """A signal asks the check to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def stop_on_signals() -> None:
    """Raise Stopped at the first SIGINT, SIGTERM or SIGHUP, and ignore later ones: the end takes seconds.

    Also gives every child the default action of these signals, which a shell's background job would not have.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for later in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(later, lambda number, frame: None)
        raise Stopped(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)


def run_all(
    steps: Sequence[Step], folder: Path, tell: Callable[[list[Result]], None]
) -> list[Result]:
    """Run the steps in order and return their results; ``tell`` gets all results so far after each one.

    A step must end by the time at which the limits of all steps up to it are spent, and within ``PATIENCE`` times its
    own limit. So time that a step saves serves later ones, and a step that hangs takes time from none.

    Raises Stopped, after the running step has ended and the rest are recorded as skipped.
    """
    results: list[Result] = []
    deadline = start = time.monotonic()
    for i, step in enumerate(steps):
        deadline += step.limit
        began = time.monotonic()
        allowed = min(deadline - began, PATIENCE * step.limit)
        blocked = obstacle(step, results)
        try:
            if blocked:
                results.append(Result(step.name, "skipped", 0.0, blocked))
            elif allowed < min(SHORTEST, step.limit / 2):
                results.append(
                    Result(
                        step.name,
                        "failed",
                        0.0,
                        f"no time left after {began - start:.0f} s",
                    )
                )
            else:
                results.append(run(step, allowed, folder))
            tell(results)
        except Stopped as stopped:
            if len(results) == i:
                results.append(judge_log(step, folder, None, f"stopped by {stopped}"))
                results[-1].seconds = time.monotonic() - began
            results += [
                Result(later.name, "skipped", 0.0, f"stopped by {stopped}")
                for later in steps[i + 1 :]
            ]
            tell(results)
            raise
    return results


def obstacle(step: Step, results: list[Result]) -> str | None:
    """The reason why a step cannot run, or None."""
    for result in results:
        if result.step in step.needs and result.status != "ok":
            return (
                result.says
                if result.status == "skipped"
                else f"needs {result.step}, which failed: {result.says}"
            )
    return None


def run(step: Step, allowed: float, folder: Path) -> Result:
    """Run one step for at most ``allowed`` seconds, writing its output to ``NAME.log`` in ``folder``."""
    environment = (
        os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "250"} | step.environment
    )  # pytest cuts reasons
    start = time.monotonic()
    with open(folder / f"{step.name}.log", "wb") as log:
        try:
            process = subprocess.Popen(
                step.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                start_new_session=True,  # so that whatever the step has started can be ended with it
            )
        except FileNotFoundError:
            return Result(
                step.name, "skipped", 0.0, f"no {step.command[0]} on this machine"
            )
        ended = None
        try:
            process.wait(allowed)
        except subprocess.TimeoutExpired:
            ended = f"stopped after {allowed:.0f} s"
        finally:
            end(process)
    result = judge_log(step, folder, process.returncode, ended)
    result.seconds = time.monotonic() - start
    return result


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it has started: SIGINT first, SIGKILL after the grace period."""
    for number, seconds in ((signal.SIGINT, GRACE), (signal.SIGKILL, None)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
    try:
        os.killpg(process.pid, signal.SIGKILL)  # children that outlive the process
    except ProcessLookupError:
        return


def judge_log(
    step: Step, folder: Path, status: int | None, ended: str | None
) -> Result:
    """Judge a step by its log, its exit status and, if it was ended early, the words for that."""
    file = folder / f"{step.name}.log"
    log = file.read_text(errors="replace") if file.is_file() else ""
    if ended is None and status is not None and status < 0:
        ended = f"killed by {signal.Signals(-status).name}"
    if step.tests:
        result = judge_tests(step.name, log, status, ended)
        return (
            judge_report(result, log, folder / f"{step.name}.report.txt")
            if step.sanitizer
            else result
        )
    last = next(
        (line.strip() for line in reversed(log.splitlines()) if line.strip()), ""
    )
    if status == SKIP:
        return Result(step.name, "skipped", 0.0, last)
    says = "; ".join(part for part in (ended, last) if part)
    return Result(
        step.name, "ok" if status == 0 and ended is None else "failed", 0.0, says[:300]
    )


def judge_tests(name: str, log: str, status: int | None, ended: str | None) -> Result:
    """Count the outcomes in a log of verbose pytest; name the first failing test and the one that did not end."""
    outcomes: dict[str, list[str]] = {"PASSED": [], "FAILED": [], "SKIPPED": []}
    running, reason = "", ""
    for test, outcome, rest, late_outcome, late_rest in _TEST.findall(log):
        if late_outcome and not running:
            continue  # a line of the summary at the end
        test = test or running
        outcome, rest = outcome or late_outcome, rest or late_rest
        running = "" if outcome else _DUMP.sub("", test).strip()
        if outcome in ("XFAIL", "XPASS"):
            outcome = "PASSED"
        if outcome:
            outcomes["FAILED" if outcome == "ERROR" else outcome].append(test)
        if outcome == "SKIPPED" and not reason:
            reason = (
                re.sub(r"\s*\[\s*\d+%\]$", "", rest)
                .strip()
                .removeprefix("(")
                .removesuffix(")")
            )
    passed, failed, skipped = (len(tests) for tests in outcomes.values())
    parts = [f"{passed} passed, {failed} failed, {skipped} skipped"]
    if ended or (running and status != 0):
        parts.append(
            (ended or f"ended with status {status}")
            + (f" in {running}" if running else "")
        )
    if failed:
        parts.append(f"first failure: {outcomes['FAILED'][0]}")
    verdict = "ok" if status == 0 and ended is None else "failed"
    if verdict == "ok" and not passed:
        verdict, parts = (
            ("skipped", [reason or parts[0]])
            if skipped
            else ("failed", ["no test was run"])
        )
    elif not (passed or failed or skipped or running or ended):
        problem = re.findall(r"^E  +(\w+Error\b.*)$", log, re.MULTILINE)
        parts = [
            f"no test was run (pytest ended with status {status}){': ' + problem[0] if problem else ''}"
        ]
    return Result(name, verdict, 0.0, "; ".join(parts), passed, failed, skipped)


def judge_report(result: Result, log: str, report: Path) -> Result:
    """Add what compute-sanitizer reports; a tool that cannot watch this GPU is skipped, one that saw nothing failed."""
    text = f"{report.read_text(errors='replace') if report.is_file() else ''}\n{log}"
    refusal, unwatched, found = (
        UNSUPPORTED.search(text),
        UNWATCHED.search(text),
        _REPORT.findall(text),
    )
    if refusal:
        result.status, result.says = "skipped", f"compute-sanitizer: {refusal[0]}"
        result.passed = result.failed = result.skipped = (
            None  # tests do not get far then, and show nothing
        )
    elif unwatched:
        result.status, result.says = (
            "failed",
            f"{result.says}; compute-sanitizer: {unwatched[0]}",
        )
    elif found:
        result.says += f"; {found[-1]}"
    elif result.status == "ok":  # the tests passed, but nobody watched them
        result.status, result.says = (
            "failed",
            f"{result.says}; compute-sanitizer wrote no summary",
        )
    return result
