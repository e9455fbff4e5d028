"""Compile the fake libraries that are loaded before those of CUDA.

python tests/rehearsal/build_fakes.py FOLDER          with a CUDA build of torch: all of them
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).parent / "runtime"
RUNTIME, DRIVER, BLAS, BLAS_LT = (
    "libcudart.so.13",
    "libcuda.so.1",
    "libcublas.so.13",
    "libcublasLt.so.13",
)
LIBRARIES = (RUNTIME, DRIVER, BLAS, BLAS_LT)
"""Libraries in the order in which they are loaded."""

OF_TORCH = (
    "libc10_cuda.so",
    "libtorch_cuda.so",
    "libtorch_cuda_linalg.so",
    "libtorch_python.so",
)

SPECIAL = {
    "cublasCreate_v2": "int cublasCreate_v2(void** handle) { *handle = calloc(1, 64); return 0; }",
    "cublasDestroy_v2": "int cublasDestroy_v2(void* handle) { free(handle); return 0; }",
    "cublasGetMathMode": "int cublasGetMathMode(void* handle, int* mode) { *mode = 0; return 0; }",
    "cublasGetPointerMode_v2": "int cublasGetPointerMode_v2(void* handle, int* mode) { *mode = 0; return 0; }",
    "cublasLtGetVersion": "size_t cublasLtGetVersion(void) { return 130000; }",
    "cublasLtMatmulAlgoGetHeuristic": (
        "int cublasLtMatmulAlgoGetHeuristic(void* a, void* b, void* c, void* d, void* e, void* f, void* g, int room, "
        "void* results, int* count) { memset(results, 0, 96); *count = 1; return 0; }"
    ),
}
"""Functions of cuBLAS that do more than to succeed."""


def find_toolkit() -> Path:
    """The CUDA toolkit whose headers the fake runtime is compiled with. Raises SystemExit without a toolkit."""
    nvcc = shutil.which("nvcc")
    homes = [Path(nvcc).resolve().parent.parent] if nvcc else []
    for home in (*homes, Path("/usr/local/cuda")):
        if (home / "include" / "cuda_runtime_api.h").is_file():
            return home
    raise SystemExit(
        "no CUDA toolkit: neither nvcc on the PATH nor /usr/local/cuda; its headers are needed"
    )


def compile_runtime(
    folder: Path, include: Path, options: Iterable[str] = ("-O1",)
) -> list[Path]:
    """Compile the fake runtime's sources; those whose objects are newer are left alone. Returns the objects."""
    objects, running = [], []
    newest_header = max(path.stat().st_mtime for path in SOURCES.glob("*.h"))
    for source in sorted(SOURCES.glob("*.cpp")):
        made = folder / f"{source.stem}.o"
        objects.append(made)
        if made.is_file() and made.stat().st_mtime > max(
            newest_header, source.stat().st_mtime
        ):
            continue
        command = [
            "g++",
            "-std=c++20",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fPIC",
            *options,
            f"-I{include}",
            "-c",
        ]
        running.append(subprocess.Popen([*command, str(source), "-o", str(made)]))
    statuses = [process.wait() for process in running]
    if any(statuses):
        raise SystemExit("the fake runtime does not compile")
    return objects


def link_runtime(folder: Path, objects: list[Path], stubs: Iterable[str] = ()) -> Path:
    """Link the fake runtime; ``stubs`` are functions that only say that they are not modelled."""
    source = folder / "stubs.c"
    functions = [
        f'int {name}(void) {{ return rehearsal_not_modelled("{name}"); }}'
        for name in stubs
    ]
    source.write_text(
        "\n".join(["int rehearsal_not_modelled(const char* name);", *functions, ""])
    )
    subprocess.run(
        ["gcc", "-fPIC", "-c", str(source), "-o", str(folder / "stubs.o")], check=True
    )
    return _link("g++", [], [*objects, folder / "stubs.o"], folder / RUNTIME)


def build_driver(folder: Path) -> Path:
    """Compile the fake driver."""
    return _link(
        "gcc", ["-O1", "-Wall", "-Wextra"], [SOURCES / "driver.c"], folder / DRIVER
    )


def build_blas(folder: Path, names: Iterable[str]) -> None:
    """Compile both cuBLAS libraries, whose functions succeed and do nothing."""
    names = sorted(names)
    for library, wanted in ((BLAS, False), (BLAS_LT, True)):
        mine = [name for name in names if name.startswith("cublasLt") is wanted]
        functions = [
            SPECIAL.get(name, f"int {name}() {{ return 0; }}") for name in mine
        ]
        source = folder / f"{library}.c"
        source.write_text(
            "\n".join(["#include <stdlib.h>", "#include <string.h>", *functions, ""])
        )
        _link("gcc", ["-O1", "-w"], [source], folder / library)


def build(folder: Path) -> None:
    """Compile all libraries for the torch of this interpreter."""
    import torch

    if torch.version.cuda is None:
        raise SystemExit(
            f"torch {torch.__version__} is a CPU build; the rehearsal needs a CUDA build"
        )
    folder.mkdir(parents=True, exist_ok=True)
    of_torch = [Path(torch.__file__).parent / "lib" / name for name in OF_TORCH]
    wanted = {
        name
        for library in of_torch
        for name in symbols(library, "--dynamic", "--undefined-only")
    }
    include = find_toolkit() / "include"
    objects = compile_runtime(folder, include)
    known = {name for made in objects for name in symbols(made, "--defined-only")}
    missing = {name for name in wanted if name.startswith(("cuda", "__cuda"))} - known
    link_runtime(folder, objects, sorted(missing))
    build_driver(folder)
    build_blas(folder, (name for name in wanted if name.startswith("cublas")))


def symbols(library: Path, *which: str) -> list[str]:
    """Names of symbols as ``nm`` lists them, without their versions."""
    listed = subprocess.run(
        ["nm", *which, str(library)], capture_output=True, text=True, check=True
    ).stdout
    return [
        line.split()[-1].split("@")[0] for line in listed.splitlines() if line.strip()
    ]


def _link(
    compiler: str, options: list[str], sources: list[Path], library: Path
) -> Path:
    """Every symbol gets the version that the real library gives it, which is the library's name."""
    versions = library.with_suffix(".map")
    versions.write_text(f"{library.name} {{ global: *; }};\n")
    shape = [
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{library.name}",
        f"-Wl,--version-script={versions}",
    ]
    subprocess.run(
        [compiler, *options, *shape, *map(str, sources), "-ldl", "-o", str(library)],
        check=True,
    )
    return library


if __name__ == "__main__":
    build(Path(sys.argv[1]))
