"""Rehearse Esper's CUDA side without a GPU: ``python tests/rehearsal/rehearse.py``, or ``make gpu-rehearsal``.

For each torch: an environment with its CUDA build, Esper with its CUDA module, and a fake CUDA runtime; then the tests
of streams and devices with several interleavings of streams, runs on one and two fake GPUs, and planted faults that the
tests must notice. The result is written to benchmarks/results/gpu_rehearsal.md. Everything else lies below
build/rehearsal and is used again.

Exit status: 0 if everything passed and every fault was noticed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.fault import Fault
from tests.rehearsal import record, steps  # found only after the line above
from tests.rehearsal.faults import FAULTS
from tests.rehearsal.workplace import ROOT, Workplace

VERSIONS = ("2.11.0", "2.15.0")
"""The oldest torch that Esper supports, and the newest."""

RECORD = ROOT / "benchmarks" / "results" / "gpu_rehearsal.md"
TEST_LIMIT, RUN_LIMIT, FAULT_LIMIT = 1800.0, 600.0, 600.0
STREAMS, DEVICES = "tests/cuda/test_gpu_streams.py", "tests/cuda/test_devices.py"
PARTS = 4
"""Processes that share the tests of streams."""

SHORT = [
    "--rounds",
    "1",
    "--controller",
    "schedule",
    "--envs",
    "2",
    "--episode-length",
    "6",
]
RUNS = {
    "--device cuda": (1, []),
    "--device cuda:0,cuda:1": (2, []),
    "--device cuda:1": (2, ["--idle", "0"]),
}
"""Options of ``esper run``: how many devices there are, and what else the command is given."""


def main(arguments: list[str] | None = None) -> int:
    """Rehearse as the command line asks; returns the exit status."""
    options = parse(arguments)
    begin = time.monotonic()
    command = shlex.join(
        [
            "python",
            "tests/rehearsal/rehearse.py",
            *(sys.argv[1:] if arguments is None else arguments),
        ]
    )
    rehearsals: list[record.Rehearsal] = []
    for version in options.torch or VERSIONS:
        place = Workplace.of(version, options.python)
        place.prepare()
        rehearsals.append(
            rehearse(
                place, options.seeds, FAULTS if options.faults else (), options.jobs
            )
        )
        text = record.written(rehearsals, time.monotonic() - begin, command)
        if options.record:
            RECORD.write_text(text)
    print(text)
    return 0 if all(rehearsal.passed for rehearsal in rehearsals) else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--torch",
        action="append",
        metavar="VERSION",
        help=f"default: {' and '.join(VERSIONS)}",
    )
    parser.add_argument(
        "--python",
        type=Path,
        help="an interpreter that has this torch, instead of one made here",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[1, 2],
        help="of interleavings; default: 1 2",
    )
    parser.add_argument(
        "--faults",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="plant faults, too",
    )
    parser.add_argument(
        "--record",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=f"write {RECORD.name}",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        help="steps at a time; default: one for each core",
    )
    options = parser.parse_args(arguments)
    if options.python is not None and len(options.torch or VERSIONS) != 1:
        parser.error("--python has one torch: name it with --torch VERSION")
    return options


def rehearse(
    place: Workplace, seeds: list[int], faults: tuple[Fault, ...], jobs: int
) -> record.Rehearsal:
    """Do all steps with one torch, ``jobs`` at a time."""
    begin = time.monotonic()
    with ThreadPoolExecutor(jobs) as pool:

        def start(
            do: Callable[..., steps.Result], *what: object
        ) -> Future[steps.Result]:
            return pool.submit(lambda: said(place, do(place, *what)))

        parts_of = {
            seed: [
                start(run_tests, STREAMS, seed, part) for part in range(1, PARTS + 1)
            ]
            for seed in seeds
        }
        devices = [start(run_tests, DEVICES, seed) for seed in seeds]
        runs = [start(run_esper, device) for device in RUNS]
        planted = [start(run_fault, fault) for fault in faults]
    whole = [
        steps.joined(
            f"{Path(STREAMS).name}, seed {seed}", [part.result() for part in parts]
        )
        for seed, parts in parts_of.items()
    ]
    return record.Rehearsal(
        torch=place.ask("import torch; print(torch.__version__)"),
        python=place.ask("import platform; print(platform.python_version())"),
        seeds=seeds,
        tests=[*whole, *(result.result() for result in devices)],
        runs=[result.result() for result in runs],
        faults=[result.result() for result in planted],
        seconds=time.monotonic() - begin,
    )


def said(place: Workplace, result: steps.Result) -> steps.Result:
    """Print how the step went, and return it."""
    how = f"status {result.status}, {result.seconds:.0f} s: {result.last_line}"
    print(f"torch {place.torch}: {result.name}: {how}", flush=True)
    return result


def run_tests(
    place: Workplace, file: str, seed: int, part: int | None = None
) -> steps.Result:
    """The tests of one file, or one part of them, with one interleaving of streams."""
    environment = place.environment(seed, devices=2 if file == DEVICES else 1)
    name = f"{Path(file).name}, seed {seed}"
    if part is not None:
        environment["REHEARSAL_PART"] = f"{part}/{PARTS}"
        name += f", part {part}"
    return run_pytest(place, name, [file], environment, TEST_LIMIT)


def run_pytest(
    place: Workplace,
    name: str,
    arguments: list[str],
    environment: dict[str, str],
    limit: float,
) -> steps.Result:
    report = place.logs / f"{name}.xml"
    report.unlink(missing_ok=True)
    pytest = [
        "-m",
        "pytest",
        "-p",
        "tests.rehearsal.plugin",
        "-v",
        "--tb=short",
        "-p",
        "no:cacheprovider",
    ]
    options = [
        "-o",
        "addopts=--strict-markers --import-mode=importlib",
        f"--junit-xml={report}",
    ]
    result = place.run(name, [*pytest, *options, *arguments], environment, limit)
    result.tests = steps.outcomes(report)
    return result


def run_esper(place: Workplace, device: str) -> steps.Result:
    """``esper run`` on fake GPUs, without fallbacks."""
    devices, options = RUNS[device]
    out = place.logs / "runs" / device.replace(" ", "-")
    shutil.rmtree(out, ignore_errors=True)
    environment = {**place.environment(1, devices), "ESPER_REQUIRE_NATIVE": "1"}
    command = [
        "-m",
        "tests.rehearsal.esper_command",
        *options,
        "run",
        *device.split(),
        *SHORT,
        "--out",
        str(out),
    ]
    return place.run(f"esper run {device}", command, environment, RUN_LIMIT)


def run_fault(place: Workplace, fault: Fault) -> steps.Result:
    """The tests that must notice a fault, until the first one does."""
    name = f"fault: {fault.name}"
    source = place.logs.parent / "faulty" / fault.name.replace(" ", "-")
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(
        place.source,
        source,
        ignore=shutil.ignore_patterns(".git", "__pycache__", "build", "runs"),
    )
    try:
        fault.plant(source)
        return run_pytest(
            place,
            name,
            [STREAMS, "-x", "-k", fault.tests],
            place.environment(1, 1, source),
            FAULT_LIMIT,
        )
    except ValueError as error:
        log = place.logs / f"{name}.log"
        log.write_text(f"{error}\n")
        return steps.Result(name, steps.NOT_PLANTED, 0.0, log)
    finally:
        shutil.rmtree(source)


if __name__ == "__main__":
    sys.exit(main())
