"""Break Esper on purpose, one small edit at a time, and see whether the test named beside it fails: ``make mutants``.

Each mutant is tried in a copy of the sources with the built modules of this checkout. First its test runs without the
edit, where it must pass; then with it, where it must fail; an edit of C++ is compiled. A mutant whose test still passes
has survived: the test does not show what it is named for. Nothing in this checkout is changed.

Exit status: 0 if every mutant was noticed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fault import Fault  # found only after the line above
from tests.mutants.table import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 600.0
"""Seconds after which a test counts as failed: an edit may make it hang."""

NOTICED, SURVIVED, BROKEN = "noticed", "SURVIVED", "BROKEN"
TEST_FAILED = 1
"""The exit status of pytest if a test failed; other errors, such as a test that does not exist, have others."""


def main(arguments: list[str] | None = None) -> int:
    """Try the mutants that the command line chooses; returns the exit status."""
    options = parse(arguments)
    chosen = choose(options.row, options.daily)
    results: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        copy = copy_of_sources(Path(name))
        passing: dict[str, bool] = {}
        for row, fault in chosen:
            begin = time.monotonic()
            if fault.tests not in passing:
                passing[fault.tests] = run(fault.tests, copy).returncode == 0
            result = (
                tried(fault, copy)
                if passing[fault.tests]
                else f"{BROKEN}: its test fails without the edit"
            )
            results.append(result)
            print(
                f"{result:9} {row}: {fault.name} ({fault.tests}), {time.monotonic() - begin:.0f} s",
                flush=True,
            )
    noticed = results.count(NOTICED)
    print(f"{noticed} of {len(results)} mutants were noticed")
    return 0 if noticed == len(results) else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--row",
        action="append",
        help="only mutants of this row, such as 'trap 3' or 'C1'; repeatable",
    )
    parser.add_argument(
        "--daily", type=int, metavar="N", help="only N of them, each day the next ones"
    )
    return parser.parse_args(arguments)


def choose(
    rows: list[str] | None, daily: int | None, day: int | None = None
) -> list[tuple[str, Fault]]:
    """Returns (row, mutant) of those asked for. Raises SystemExit if a row has none."""
    unknown = sorted(set(rows or ()) - set(MUTANTS))
    if unknown:
        raise SystemExit(
            f"no mutant belongs to {', '.join(unknown)}; rows with mutants: {', '.join(MUTANTS)}"
        )
    chosen = [
        (row, fault)
        for row, faults in MUTANTS.items()
        if not rows or row in rows
        for fault in faults
    ]
    if daily is None:
        return chosen
    start = (int(time.time() // 86400) if day is None else day) * daily
    return [
        chosen[(start + index) % len(chosen)]
        for index in range(min(daily, len(chosen)))
    ]


def copy_of_sources(folder: Path) -> Path:
    """Copies what git tracks or would track, and the built modules, below ``folder``; returns where they lie."""
    copy = folder / "source"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
    copy_built_modules(copy)
    return copy


def copy_built_modules(copy: Path) -> None:
    for path in (*ROOT.glob("esper/*.so"), ROOT / "esper" / "_build_info.json"):
        shutil.copy2(path, copy / "esper")


def build(copy: Path) -> None:
    """Compiles the modules of the copy, which takes minutes. Raises CalledProcessError if that fails."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(
        command,
        cwd=copy,
        check=True,
        capture_output=True,
        env={**os.environ, "ESPER_CUDA": "0"},
    )


def tried(fault: Fault, copy: Path) -> str:
    """Plants the fault in the copy, runs its test, and puts the file back."""
    original = (copy / fault.file).read_text()
    fault.plant(copy)
    try:
        if fault.file.startswith("csrc/"):
            build(copy)
        done = run(fault.tests, copy)
    except subprocess.TimeoutExpired:
        return NOTICED
    finally:
        (copy / fault.file).write_text(original)
        if fault.file.startswith("csrc/"):
            copy_built_modules(copy)
    if done.returncode == TEST_FAILED:
        return NOTICED
    if done.returncode == 0:
        return SURVIVED
    # A process that dies, of a segmentation fault for example, is noticed as well; pytest's own errors are not.
    return NOTICED if done.returncode < 0 else f"{BROKEN}: {last_line(done.stdout)}"


def run(tests: str, copy: Path) -> subprocess.CompletedProcess[str]:
    """Runs the test in the copy; no byte code is kept, or an edit within the same second would not be seen."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-m",
            "",
            "-p",
            "no:cacheprovider",
            "--strict-markers",
            tests,
        ],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


if __name__ == "__main__":
    raise SystemExit(main())
