"""Find which Python packages the check needs and this machine lacks, and install them from a folder of wheels.

    python -m benchmarks.gpu.packages [--wheels FOLDER --target FOLDER]

The list comes from pyproject.toml and, from there, from the packages' own metadata. torch is never installed: the torch
of the machine is the one to check. Exit status: 0 if nothing is missing, else 1; the last line of output says what.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

try:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name, parse_wheel_filename
except ImportError:  # on a bare machine; pip is there in any case, with its own copy
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name, parse_wheel_filename

from benchmarks.gpu.runner import ROOT

# Dependencies that no step imports; a test runs the imports without them.
UNUSED = {"matplotlib"}
# What the tests in tests/cuda import of the extra `test`; the same test shows it.
TEST_PACKAGES = {"pytest", "hypothesis"}


def required() -> list[Requirement]:
    """Packages that pyproject.toml requires to build Esper, to run it and to test its CUDA side."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = map(Requirement, project["build-system"]["requires"])
    runtime = [Requirement(line) for line in project["project"]["dependencies"]]
    test = [
        Requirement(line)
        for line in project["project"]["optional-dependencies"]["test"]
    ]
    return [
        *build,
        *(need for need in runtime if need.name not in UNUSED),
        *(need for need in test if need.name in TEST_PACKAGES),
    ]


def missing(requirements: list[Requirement]) -> list[Requirement]:
    """Requirements that the installed packages do not meet, their own requirements included, by name.

    What torch requires is left to torch, and what a missing package requires is not known.
    """
    found: dict[str, Requirement] = {}
    seen: set[str] = set()
    waiting = list(requirements)
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        installed = distribution(name)
        if installed is None or not need.specifier.contains(
            installed.version, prereleases=True
        ):
            found.setdefault(name, need).specifier &= need.specifier
        if installed is not None and name not in seen and name != "torch":
            waiting += [Requirement(line) for line in installed.requires or []]
        seen.add(name)
    return [found[name] for name in sorted(found)]


def download_command(needs: list[Requirement]) -> str:
    """The command that downloads wheels of these packages and of what they require, for the Python of this machine."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    names = " ".join(shlex.quote(f"{need.name}{need.specifier}") for need in needs)
    return f"python -m pip download --only-binary=:all: --python-version {version} --dest wheels {names}"


def wheels_to_install(folder: Path, needs: list[Requirement]) -> list[Path]:
    """The newest wheel of each package that is not installed or does not meet a need; never torch."""
    unmet = {canonicalize_name(need.name) for need in needs}
    newest: dict[str, Path] = {}
    for wheel in sorted(
        folder.glob("*.whl"), key=lambda path: parse_wheel_filename(path.name)[1]
    ):
        name = parse_wheel_filename(wheel.name)[0]
        if name != "torch" and (name in unmet or distribution(name) is None):
            newest[name] = wheel
    return [newest[name] for name in sorted(newest)]


def distribution(name: str) -> metadata.Distribution | None:
    """The installed package of that name, or None."""
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def install(wheels: list[Path], target: Path) -> int:
    """Install wheels into a folder of their own and see them from here on; return pip's exit status."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
    ]
    status = subprocess.run(
        [*command, "--target", str(target), *map(str, wheels)]
    ).returncode
    sys.path.insert(0, str(target))
    return status


def main() -> int:
    """Install wheels if a folder of them is named, then list all that is missing; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--target", type=Path)
    arguments = parser.parse_args()
    needs = required()
    if arguments.wheels is not None:
        if not any(arguments.wheels.glob("*.whl")):
            print(f"no wheel in {arguments.wheels}")
            return 1
        wheels = wheels_to_install(arguments.wheels, missing(needs))
        print(
            "installing from wheels:",
            ", ".join(wheel.name for wheel in wheels) or "nothing",
            flush=True,
        )
        if wheels and install(wheels, arguments.target):
            print("pip could not install the wheels")
            return 1
    lacking = missing(needs)
    if not lacking:
        print("every package is there")
        return 0
    print(
        "Packages are missing, and steps that need them are skipped. On a machine of this kind with network, type:"
    )
    print(f"    {download_command(lacking)}")
    print("and here, with the folder that it makes:")
    print("    benchmarks/gpu_check.sh --wheels wheels")
    print(
        "missing packages:",
        ", ".join(f"{need.name}{need.specifier}" for need in lacking),
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
