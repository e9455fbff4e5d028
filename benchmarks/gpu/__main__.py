"""Check on a GPU everything of Esper that only a GPU can show, within ten minutes.

Builds the CUDA module in place, runs the tests of its kernels and of hosts in training, looks for wild accesses and
races with compute-sanitizer, measures, and grows hosts. A step that cannot be done here is skipped with the reason.
Each step has a limit, and the limits add up to 570 s. Exit status: 0, 1 if a step failed, 128 plus the number of a
signal that ended the check.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu import summary
from benchmarks.gpu.plan import make_plan
from benchmarks.gpu.runner import Result, Step, Stopped, run_all, stop_on_signals
from build_support import cuda


def check(steps: Sequence[Step], folder: Path, archive: Path) -> int:
    """Run the steps, printing a line for each, and write the summary and the archive after each one.

    Returns 0, or 1 if a step failed, or 128 plus the number of the signal that ended the check.
    """
    stop_on_signals()
    shown = 0

    def tell(results: list[Result]) -> None:
        nonlocal shown
        for result in results[shown:]:
            print(
                f"{result.step:24s} {result.status:8s} {result.seconds:6.1f} s  {result.says}",
                flush=True,
            )
            if result.status == "failed":
                for line in summary.tail(folder / f"{result.step}.log"):
                    print(f"    | {line}", flush=True)
        shown = len(results)
        summary.write(results, folder, archive)

    try:
        results = run_all(steps, folder, tell)
    except Stopped as stopped:
        status = 128 + stopped.number
    else:
        status = 1 if any(result.status == "failed" for result in results) else 0
    print(f"summary: {folder / 'summary.md'}\narchive: {archive}")
    return status


def main() -> int:
    """Parse the command line and run the plan; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu_check.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("gpu_check"),
        help="for summary.md, logs and reports",
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        metavar="FOLDER",
        help="wheels of packages that this machine lacks; nothing is replaced",
    )
    parser.add_argument(
        "--archive",
        type=Path,
        metavar="FILE",
        help="all results in one file (default: FOLDER/gpu_check.tar.gz)",
    )
    arguments = parser.parse_args()
    if arguments.wheels is not None and not arguments.wheels.is_dir():
        parser.error(f"--wheels {arguments.wheels}: no such folder")
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(
            f"{folder} is not empty; name a new folder, so that results are not mixed"
        )
    archive = (arguments.archive or folder / "gpu_check.tar.gz").absolute()
    archive.parent.mkdir(parents=True, exist_ok=True)
    wheels = arguments.wheels.absolute() if arguments.wheels else None
    with tempfile.TemporaryDirectory() as site:
        found = [
            str(home / "bin") for home in cuda.toolkit_candidates(dict(os.environ))[:1]
        ]
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], site])
        os.environ["PATH"] = os.pathsep.join(
            [os.environ["PATH"], f"{site}/bin", *found]
        )
        return check(make_plan(folder, Path(site), wheels), folder, archive)


if __name__ == "__main__":
    sys.exit(main())
