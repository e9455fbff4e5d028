"""Compile every CUDA kernel without building a module, so that they cannot rot where there is no GPU.

Works beside a CPU torch: the kernels use torch's stable headers, which are the same in every build of torch.

    python build_support/check_cuda_compiles.py

Exit status: 0 all compile, 1 one does not, 3 no toolkit on this machine.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from build_support import cuda, extensions  # noqa: E402  # found only after the line above

ARCHITECTURES = ("80", "90")
NO_TOOLKIT = 3


def compile_command(nvcc: Path, source: Path, architecture: str, output: Path) -> list[str]:
    """The nvcc call that setup.py would make, for one architecture, treating warnings as errors."""
    includes = [argument for path in cpp_extension.include_paths() for argument in ("-isystem", path)]
    return [
        str(nvcc),
        "-c",
        str(source),
        "-o",
        str(output),
        "-std=c++20",  # what torch's builder would pass
        f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
        *extensions.NVCC_FLAGS,
        "-Werror=all-warnings",
        "-DC10_USING_CUSTOM_GENERATED_MACROS",  # a CPU torch lacks c10/cuda's generated header
        *includes,
    ]


def main() -> int:
    """Compile all kernels; return the exit status."""
    homes = cuda.toolkit_candidates(dict(os.environ))
    if not homes:
        print("no CUDA toolkit on this machine: the CUDA kernels were NOT checked", file=sys.stderr)
        return NO_TOOLKIT
    failed = 0
    sources = sorted((ROOT / "csrc" / "cuda").glob("*.cu"))
    with tempfile.TemporaryDirectory() as folder:
        for source in sources:
            for architecture in ARCHITECTURES:
                command = compile_command(homes[0] / "bin/nvcc", source, architecture, Path(folder, "out.o"))
                status = subprocess.run(command).returncode
                print(f"{source.relative_to(ROOT)} for sm_{architecture}: {'ok' if status == 0 else 'FAILED'}")
                failed += status != 0
    print(f"{len(sources)} files with torch {torch.__version__} headers and the toolkit {homes[0].name}")
    return 1 if failed or not sources else 0


if __name__ == "__main__":
    sys.exit(main())
