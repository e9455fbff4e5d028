"""Builds a wheel and tries it as a user without a compiler would: installed in a fresh environment, then run.

    python build_support/check_wheel.py [--out dist] [--torch 2.13.0|installed] [--wheel dist/FILE.whl]

The wheel is compiled against the installed torch, and its operators load on every torch from 2.11 on, because they use
only the stable ABI; ``_runtime`` is for the Python that builds it. If auditwheel and patchelf are installed, the wheel
gets the manylinux tag of the oldest glibc that it runs on. torch's own libraries are left out of it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY = ("env.n_envs=2", "env.episode_length=4", "env.baseline_episodes=1")
RUN = ("run", "--controller", "random", "--rounds", "1", *(word for value in TINY for word in ("--set", value)))
FROM_TORCH = ("libtorch*.so*", "libc10*.so*", "libcud*.so*", "libgomp*.so*")
INSTALLED = "installed"
COMPILERS = ("c++", "g++", "gcc", "cc", "clang", "clang++", "nvcc", "ninja")


def main() -> None:
    options = parse()
    wheel = options.wheel or build(options.out)
    with tempfile.TemporaryDirectory() as folder:
        check(wheel.resolve(), Path(folder), options.torch)
    print(f"{wheel} works without a compiler")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Builds a wheel and tries it in a fresh environment.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel")
    parser.add_argument("--wheel", type=Path, help="a wheel that is already built")
    parser.add_argument(
        "--torch",
        default="2.13.0",
        help="version of torch that the wheel is tried with; installed: torch and all else as in this Python",
    )
    return parser.parse_args()


def build(out: Path) -> Path:
    """Builds the wheel into ``out`` and returns its path, with the manylinux tag if the tools are there."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        call(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, str(ROOT))
        (made,) = Path(folder).glob("*.whl")
        if missing := [tool for tool in ("auditwheel", "patchelf") if shutil.which(tool) is None]:
            print(f"{', '.join(missing)} not installed: the wheel keeps the tag of this machine")
            return Path(shutil.copy(made, out))
        known = set(out.glob("*.whl"))
        excluded = [word for name in FROM_TORCH for word in ("--exclude", name)]
        call("auditwheel", "repair", "--wheel-dir", str(out), *excluded, str(made))
        new = set(out.glob("*.whl")) - known
        return new.pop() if new else max(known, key=lambda path: path.stat().st_mtime)


def check(wheel: Path, folder: Path, torch: str) -> None:
    """Installs the wheel in a new environment in ``folder``, and runs it there with no compiler on PATH."""
    call(sys.executable, "-m", "venv", str(folder / "venv"))
    tools = folder / "venv" / "bin"
    packages = ("--no-deps",) if torch == INSTALLED else (f"torch=={torch}",)
    call(str(tools / "pip"), "install", "--quiet", *packages, str(wheel))
    if torch == INSTALLED:
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        (site / "installed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environment = without_compilers(tools, dict(os.environ))
    call(str(tools / "esper"), "info", folder=folder, environment=environment)
    call(str(tools / "esper"), *RUN, "--out", str(folder / "run"), folder=folder, environment=environment)


def without_compilers(tools: Path, environment: dict[str, str]) -> dict[str, str]:
    """Returns an environment with only ``tools`` on PATH, in which every fallback from a compiled operator is an error.

    Raises SystemExit if a compiler is in ``tools``.
    """
    if there := [name for name in COMPILERS if shutil.which(name, path=str(tools)) is not None]:
        raise SystemExit(f"{tools} has {', '.join(there)}; this would not show that the wheel works without")
    kept = {key: value for key, value in environment.items() if key not in ("PYTHONPATH", "CC", "CXX", "CUDA_HOME")}
    return {**kept, "PATH": str(tools), "ESPER_REQUIRE_NATIVE": "1"}


def call(*command: str, folder: Path | None = None, environment: dict[str, str] | None = None) -> None:
    print("$", *command, flush=True)
    if status := subprocess.run(command, cwd=folder, env=environment, check=False).returncode:
        raise SystemExit(f"failed with {status}: {' '.join(command)}")


if __name__ == "__main__":
    main()
