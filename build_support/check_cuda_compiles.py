"""Compiles every CUDA kernel without building a module, so that they cannot rot on machines without a GPU.

Works beside a CPU torch: the kernels use torch's stable headers, which are the same in every build of torch. Each file
is compiled twice: in the oldest C++ standard of any supported torch with the oldest architecture, and in the newest
with the newest. The other two pairs would show nothing more: the front end depends on the standard, the assembler on
the architecture.

    python build_support/check_cuda_compiles.py

Exit status: 0 if all compile, 1 if one does not, 3 without a toolkit on this machine.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from build_support import cuda, extensions  # noqa: E402  # found only after the line above

# (standard, architecture): torch 2.11 builds with C++17, torch 2.13 with C++20.
TARGETS = (("c++17", "80"), ("c++20", "90"))
NO_TOOLKIT = 3


def compile_command(nvcc: Path, source: Path, standard: str, architecture: str, output: Path) -> list[str]:
    """Returns the nvcc call that setup.py would make for one architecture, treating warnings as errors."""
    includes = [argument for path in cpp_extension.include_paths() for argument in ("-isystem", path)]
    return [
        str(nvcc),
        "-c",
        str(source),
        "-o",
        str(output),
        f"-std={standard}",
        f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
        *extensions.NVCC_FLAGS,
        "-Werror=all-warnings",
        "-DC10_USING_CUSTOM_GENERATED_MACROS",  # a CPU torch lacks c10/cuda's generated header
        *includes,
    ]


def compile_all(nvcc: Path, sources: list[Path]) -> bool:
    """Compiles each source for each target, on all cores; returns whether all compile."""

    def compiles(case: tuple[Path, tuple[str, str]]) -> bool:
        source, (standard, architecture) = case
        command = compile_command(nvcc, source, standard, architecture, Path(folder, f"{source.stem}-{standard}.o"))
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        verdict = "ok" if done.returncode == 0 else "FAILED"
        print(f"{done.stdout}{source.name} as {standard} for sm_{architecture}: {verdict}", flush=True)
        return done.returncode == 0

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        return all(list(pool.map(compiles, product(sources, TARGETS))))


def main() -> int:
    """Compiles all kernels; returns the exit status."""
    homes = cuda.toolkit_candidates(dict(os.environ))
    if not homes:
        print("no CUDA toolkit on this machine: the CUDA kernels were NOT checked", file=sys.stderr)
        return NO_TOOLKIT
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    all_compile = compile_all(homes[0] / "bin/nvcc", sources)
    print(f"{len(sources)} files with torch {torch.__version__} headers and the toolkit {homes[0].name}")
    return 0 if all_compile and sources else 1


if __name__ == "__main__":
    sys.exit(main())
