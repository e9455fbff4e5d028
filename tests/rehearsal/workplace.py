"""The workplace of a rehearsal with one torch: an environment, a built copy of the tree, and the fake libraries."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.rehearsal import steps
from tests.rehearsal.build_fakes import LIBRARIES, find_toolkit

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "rehearsal"
TOOLS = (
    "setuptools>=77",
    "wheel",
    "ninja",
    "pybind11>=2.13",
    "pytest>=8",
    "hypothesis",
)
BUILD_LIMIT = 1800.0


@dataclass(frozen=True)
class Workplace:
    """``torch`` is the version, ``python`` its interpreter, ``source`` a copy of the tree, ``fakes`` the libraries."""

    torch: str
    python: Path
    source: Path
    fakes: Path
    logs: Path

    @classmethod
    def of(cls, torch: str, python: Path | None) -> Workplace:
        made = PLACE / f"torch-{torch}"
        return cls(
            torch,
            python or (made / "venv").resolve() / "bin" / "python",
            made / "source",
            made / "fakes",
            made / "logs",
        )

    def prepare(self) -> None:
        """Make everything that is missing or older than its sources. Raises SystemExit if that fails."""
        if not self.python.is_file():
            self._make_environment()
        self._check_torch()
        copy_tree(self.source)
        self._must(
            "build",
            [str(self.python), "setup.py", "egg_info", "build_ext", "--inplace"],
        )
        self._must(
            "fakes",
            [str(self.python), "tests/rehearsal/build_fakes.py", str(self.fakes)],
        )

    def environment(
        self, seed: int, devices: int, source: Path | None = None
    ) -> dict[str, str]:
        """Variables of a process on the fake GPU."""
        return {
            "LD_PRELOAD": " ".join(str(self.fakes / name) for name in LIBRARIES),
            "PYTHONPATH": str(source or self.source),
            "PYTHONFAULTHANDLER": "1",
            "OMP_NUM_THREADS": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "REHEARSAL_SEED": str(seed),
            "REHEARSAL_DEVICES": str(devices),
        }

    def run(
        self, name: str, arguments: list[str], environment: dict[str, str], limit: float
    ) -> steps.Result:
        """Run this interpreter with ``arguments`` in the copy of the tree, or where ``environment`` says."""
        return steps.run(
            name,
            [str(self.python), *arguments],
            folder=Path(environment["PYTHONPATH"]),
            log=self.logs / f"{name}.log",
            limit=limit,
            environment=environment,
        )

    def ask(self, code: str) -> str:
        """Returns the output of a line of Python there."""
        done = subprocess.run(
            [str(self.python), "-c", code], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def _make_environment(self) -> None:
        folder = self.python.parent.parent
        print(
            f"an environment with torch {self.torch}, some gigabytes: {folder}",
            flush=True,
        )
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = [
            name for name in project["dependencies"] if not name.startswith("torch")
        ]
        pip = [str(self.python), "-m", "pip", "install", "--quiet"]
        try:
            subprocess.run([*pip, f"torch=={self.torch}", *TOOLS, *wanted], check=True)
        except BaseException:
            shutil.rmtree(folder)  # otherwise the next run would treat it as complete
            raise

    def _check_torch(self) -> None:
        found = self.ask(
            "import torch; print(torch.__version__.split('+')[0], torch.version.cuda)"
        )
        version, cuda = found.split()
        if version != self.torch or cuda == "None":
            raise SystemExit(
                f"{self.python} has torch {version} for CUDA {cuda}, and torch {self.torch} with CUDA is needed"
            )

    def _must(self, name: str, command: list[str]) -> None:
        environment = {
            "ESPER_CUDA": "1",
            "TORCH_CUDA_ARCH_LIST": "9.0",
            "PYTHONPATH": str(self.source),
            "PATH": f"{self.python.parent}:{find_toolkit() / 'bin'}:{os.environ['PATH']}",
        }
        log = self.logs / f"{name}.log"
        result = steps.run(
            name,
            command,
            folder=self.source,
            log=log,
            limit=BUILD_LIMIT,
            environment=environment,
        )
        if result.status != 0:
            raise SystemExit(
                f"torch {self.torch}: {name} failed, see {log}: {result.last_line}"
            )


def copy_tree(to: Path) -> None:
    """Copy what git tracks or would track; files that are equal keep their times, so that builds go on from there."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    _remove(
        to,
        lambda name: (
            name.endswith((".py", ".cpp", ".h", ".cu", ".cuh"))
            and name not in set(names)
        ),
    )
    for name in names:
        source, target = ROOT / name, to / name
        if not target.is_file() or not filecmp.cmp(source, target, shallow=False):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def _remove(folder: Path, unwanted: Callable[[str], bool]) -> None:
    for part in ("esper", "tests", "csrc", "build_support"):
        for path in (folder / part).rglob("*"):
            if path.is_file() and unwanted(str(path.relative_to(folder))):
                path.unlink()
