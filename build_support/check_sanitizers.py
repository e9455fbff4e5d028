"""Builds the modules of the CPU under address and undefined-behaviour sanitizers, and runs their tests with them.

    python build_support/check_sanitizers.py [TESTS ...]

The build lies in ``build/sanitized``, a copy of the sources, and is for every machine: the instruction sets that the
ordinary build chooses from are left out. A report ends the process, so that the tests fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "sanitized"
SOURCES = ("build_support", "csrc", "esper", "tests", "conftest.py", "pyproject.toml", "setup.py", "README.md")
TESTS = ("tests/ops", "tests/runtime/test_worker_pool.py", "tests/training/test_native.py")


def main() -> None:
    copy_sources()
    call({"ESPER_SANITIZERS": "1", "ESPER_CUDA": "0"}, "setup.py", "-q", "build_ext", "--inplace")
    # Python leaks by design. Its own memory is that of the sanitizer, so that reads beyond it are seen as well.
    under = {
        # libstdc++ as well, or libasan would not find what throws.
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }
    call(under, "-m", "pytest", "-q", "--capture=sys", "-p", "no:cacheprovider", *(sys.argv[1:] or TESTS))


def copy_sources() -> None:
    """Copies what the build and the tests read; what has not changed keeps its time, so that it is not built again."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.rmtree(COPY / name, ignore_errors=True)
            shutil.copytree(ROOT / name, COPY / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            COPY.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, COPY)


def library(name: str) -> str:
    """Returns the path of a library of the compiler. Raises SystemExit if it is not installed."""
    compiler = os.environ.get("CXX", "g++")
    asked = [compiler, f"-print-file-name={name}"]
    path = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(path).is_absolute():
        raise SystemExit(f"{compiler} has no {name}; install the compiler's sanitizer libraries")
    return path


def call(variables: dict[str, str], *arguments: str) -> None:
    environment = {**os.environ, **variables, "PYTHONPATH": str(COPY)}
    if status := subprocess.run([sys.executable, *arguments], cwd=COPY, env=environment).returncode:
        raise SystemExit(f"failed with {status}: python {' '.join(arguments)}")


if __name__ == "__main__":
    main()
