"""Compile every CUDA kernel without building a module, so that they cannot rot on machines without a GPU.

Works beside a CPU torch: the kernels use torch's stable headers, which are the same in every build of torch. Each file
is compiled in every C++ standard that a supported torch asks for, and for every architecture in one call.

    python build_support/check_cuda_compiles.py

Exit status: 0 all compile, 1 one does not, 3 no toolkit on this machine.
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

ARCHITECTURES = ("80", "90")
STANDARDS = ("c++17", "c++20")  # what the builder of torch 2.11 passes, and that of torch 2.13
NO_TOOLKIT = 3


def compile_command(nvcc: Path, source: Path, standard: str, output: Path) -> list[str]:
    """The nvcc call that setup.py would make, for all architectures, treating warnings as errors."""
    includes = [argument for path in cpp_extension.include_paths() for argument in ("-isystem", path)]
    return [
        str(nvcc),
        "-c",
        str(source),
        "-o",
        str(output),
        f"-std={standard}",
        *(f"-gencode=arch=compute_{architecture},code=sm_{architecture}" for architecture in ARCHITECTURES),
        *extensions.NVCC_FLAGS,
        "-Werror=all-warnings",
        "-DC10_USING_CUSTOM_GENERATED_MACROS",  # a CPU torch lacks c10/cuda's generated header
        *includes,
    ]


def compile_all(nvcc: Path, sources: list[Path]) -> bool:
    """Compile each source in each standard, as many at once as there are cores; return whether all compile."""
    architectures = " and ".join(f"sm_{architecture}" for architecture in ARCHITECTURES)

    def compiles(case: tuple[Path, str]) -> bool:
        source, standard = case
        command = compile_command(nvcc, source, standard, Path(folder, f"{source.stem}-{standard}.o"))
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        verdict = "ok" if done.returncode == 0 else "FAILED"
        print(f"{done.stdout}{source.name} as {standard} for {architectures}: {verdict}", flush=True)
        return done.returncode == 0

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        return all(list(pool.map(compiles, product(sources, STANDARDS))))


def main() -> int:
    """Compile all kernels; return the exit status."""
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
