"""The steps of the check, as data: what runs, in which order, for how long at most."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from benchmarks.gpu.runner import PATIENCE, ROOT, Step

BUDGET = 570  # seconds that the limits of all steps add up to
# Tests of whole hosts in training, which need every package. The other files in tests/cuda need torch, pytest and
# Hypothesis.
STREAM_FILES = (
    "test_gpu_streams.py",
    "test_grower.py",
    "test_devices.py",
    "test_no_fallback.py",
    "test_training_time.py",
    "test_tuned.py",
)
SELECTION = 4  # tests of a lane file that share a process
# Steps of measurement -> cases of esper-bench. Results are written after each case.
MEASURED = {
    "bench-operators": (
        "adamw",
        "cross-entropy",
        "grad-stats",
        "norm-relu-pool",
        "sgd",
        "stage-batch",
    ),
    "bench-validation": ("validate",),
    "bench-training": ("train-epoch",),
}
SIZES = {"bench-training": ("8x128x8",)}  # all others: those that the cases choose
# Seconds for groups of steps; the steps of a group share them equally.
LIMITS = {
    "machine": 15,
    "packages": 10,
    "build": 80,
    "import-kernels": 10,
    "import-runs": 10,
    "kernels": 110,
    "memcheck": 25,
    "streams": 138,
    "racecheck": 25,
    "synccheck": 15,
    "initcheck": 15,
    "bench-operators": 26,
    "bench-validation": 20,
    "bench-training": 50,
    "run": 21,
}
PYTHON = (sys.executable, "-u")
MODULE = (*PYTHON, "-m")


def kernel_files() -> list[str]:
    """Test files of single kernels, relative to the repository."""
    return [
        f"tests/cuda/{file.name}"
        for file in _test_files()
        if file.name not in STREAM_FILES
    ]


def stream_selections() -> list[list[str]]:
    """Tests of streams, a few a process, so that a fault in one of them takes few others along."""
    selections: list[list[str]] = []
    for name in STREAM_FILES:
        tree = ast.parse((ROOT / "tests/cuda" / name).read_text())
        tests = [
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        names = [f"tests/cuda/{name}::{test}" for test in tests]
        selections += [
            names[first : first + SELECTION]
            for first in range(0, len(names), SELECTION)
        ]
    return selections


def hangs_after(limit: float) -> float:
    """Seconds in one test after which the stacks of a step with this limit are printed.

    Reading the stacks of running threads can crash the process, so this is shortly before the step would be ended, even
    if it has the time that others saved.
    """
    return 0.9 * PATIENCE * limit


def pytest_command(
    selected: list[str], marks: str, report: Path, patience: float
) -> list[str]:
    """Verbose pytest with a JUnit report; after ``patience`` seconds in one test it prints where all threads are."""
    options = [
        "-v",
        "--tb=short",
        "--color=no",
        "-p",
        "no:cacheprovider",
        "-o",
        f"faulthandler_timeout={patience:g}",
    ]
    return [*MODULE, "pytest", *options, f"--junitxml={report}", "-m", marks, *selected]


def make_plan(folder: Path, site: Path, wheels: Path | None) -> list[Step]:
    """All steps. Results go to ``folder``; packages out of the folder ``wheels`` are installed into ``site``."""
    install = ["--wheels", str(wheels), "--target", str(site)] if wheels else []
    strict = {"ESPER_CUDA": "1"}
    build = ("setup.py", "-q", "egg_info", "build_ext", "--inplace")  # installs nothing
    return [
        Step(
            "machine",
            LIMITS["machine"],
            [*MODULE, "benchmarks.gpu.machine", str(folder / "machine.json")],
        ),
        Step(
            "packages",
            LIMITS["packages"],
            [*MODULE, "benchmarks.gpu.packages", *install],
            ("machine",),
        ),
        Step(
            "build",
            LIMITS["build"],
            [*PYTHON, *build],
            ("machine",),
            environment=strict,
        ),
        *_imports(),
        *_kernels(folder),
        _sanitizer(folder, "memcheck", uncached=True),
        *_streams(folder),
        _sanitizer(folder, "racecheck"),
        _sanitizer(folder, "synccheck"),
        _sanitizer(folder, "initcheck", uncached=True),
        *_measurements(folder),
        _run(folder),
    ]


def _test_files() -> list[Path]:
    return sorted((ROOT / "tests/cuda").glob("test_*.py"))


def _imports() -> list[Step]:
    """Two steps: what tests of kernels need is less than what hosts in training need."""
    return [
        Step(
            f"import-{kind}",
            LIMITS[f"import-{kind}"],
            [*MODULE, "benchmarks.gpu.imports", kind],
            needs,
        )
        for kind, needs in (("kernels", ("build",)), ("runs", ("import-kernels",)))
    ]


def _tests(
    folder: Path, name: str, limit: float, selected: list[str], needs: str
) -> Step:
    command = pytest_command(
        selected, "cuda and not slow", folder / f"{name}.xml", hangs_after(limit)
    )
    # Plugins of other packages on the machine are left out: they cost time, and some need more packages.
    environment = {"ESPER_REQUIRE_NATIVE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return Step(name, limit, command, (needs,), tests=True, environment=environment)


def _kernels(folder: Path) -> list[Step]:
    files = kernel_files()
    limit = LIMITS["kernels"] / len(files)
    names = [Path(file).stem.removeprefix("test_").replace("_", "-") for file in files]
    return [
        _tests(folder, f"kernels-{name}", limit, [file], "import-kernels")
        for name, file in zip(names, files, strict=True)
    ]


def _streams(folder: Path) -> list[Step]:
    selections = stream_selections()
    limit = LIMITS["streams"] / len(selections)
    return [
        _tests(folder, f"streams-{number}", limit, selected, "import-runs")
        for number, selected in enumerate(selections, start=1)
    ]


def _sanitizer(folder: Path, tool: str, uncached: bool = False) -> Step:
    """A tool of compute-sanitizer on the tests marked `sanitizer`.

    ``uncached`` makes each tensor an allocation of its own: with torch's caching allocator, a read past the end of one
    lands in another, and reused memory counts as initialised. Calls that fail are left to the tests: libraries try out
    what a driver can do.
    """
    marks, limit = "cuda and sanitizer and not slow", LIMITS[tool]
    tests = pytest_command(
        kernel_files(), marks, folder / f"{tool}.xml", hangs_after(limit)
    )
    watch = [
        "--tool",
        tool,
        "--error-exitcode",
        "86",
        "--report-api-errors",
        "no",
        "--launch-timeout",
        f"{limit:.0f}",
    ]
    report = [
        "--target-processes",
        "application-only",
        "--log-file",
        str(folder / f"{tool}.report.txt"),
    ]
    environment = {"ESPER_REQUIRE_NATIVE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if uncached:
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = ["compute-sanitizer", *watch, *report, *tests]
    return Step(
        tool,
        limit,
        command,
        ("import-kernels",),
        tests=True,
        sanitizer=True,
        environment=environment,
    )


def _measurements(folder: Path) -> list[Step]:
    return [
        Step(
            name,
            LIMITS[name],
            [
                *(*PYTHON, "-c", "from esper.bench.main import main; main()", *cases),
                *("--device", "cuda", "--rounds", "3", "--seconds", "2"),
                *(word for size in SIZES.get(name, ()) for word in ("--size", size)),
                *(
                    "--json",
                    str(folder / f"{name}.json"),
                    "--markdown",
                    str(folder / f"{name}.md"),
                ),
            ],
            ("import-runs",),
            environment={"ESPER_REQUIRE_NATIVE": "1"},
        )
        for name, cases in MEASURED.items()
    ]


def _run(folder: Path) -> Step:
    options = [
        "run",
        "--device",
        "cuda",
        "--controller",
        "schedule",
        "--rounds",
        "1",
        "--out",
        str(folder / "run"),
    ]
    command = [*PYTHON, "-c", "from esper.cli.main import main; main()", *options]
    return Step(
        "run",
        LIMITS["run"],
        command,
        ("import-runs",),
        environment={"ESPER_REQUIRE_NATIVE": "1"},
    )
