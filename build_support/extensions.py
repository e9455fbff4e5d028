"""The compiled modules and the build command. Imports torch, so only build commands may import this."""

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from setuptools import Extension

from build_support import cuda

ROOT = Path(__file__).resolve().parent.parent

# Only what torch 2.11 has may be used, so one build loads on every later torch too.
TORCH_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000ULL"
# A square root that may set errno is a call for each element instead of a vector instruction.
CXX_FLAGS = ["-O3", "-fno-math-errno", "-g0", "-Wall", "-Wextra", "-fvisibility=hidden"]
# What ESPER_SANITIZERS=1 adds: build_support/check_sanitizers.py. One instruction set: the addresses of all are alike.
SANITIZED = [
    "-O0",  # seven times as long to compile with -O1
    "-g1",
    "-DESPER_ONE_LEVEL",
    "-fsanitize=address,undefined",
    "-fno-sanitize=vptr",  # torch's classes are not under test
    "-fno-sanitize-recover=all",
]
# USE_CUDA opens the CUDA part of torch's C shim.
NVCC_FLAGS = ["-O3", TORCH_TARGET, "-DUSE_CUDA"]


def _sources(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def prepare_cuda(decision: cuda.CudaDecision) -> str:
    """Points torch's extension builder at the probed toolkit; returns the architectures to build for."""
    os.environ["CUDA_HOME"] = str(decision.home)  # read when torch.utils.cpp_extension is imported
    if "TORCH_CUDA_ARCH_LIST" not in os.environ and not torch.cuda.is_available():
        os.environ["TORCH_CUDA_ARCH_LIST"] = cuda.DEFAULT_ARCHITECTURES  # torch cannot guess without a GPU
    return os.environ.get("TORCH_CUDA_ARCH_LIST", "the GPUs of this machine")


def modules(decision: cuda.CudaDecision) -> list[Extension]:
    """Returns ``esper._C`` and ``esper._runtime``, and ``esper._C_cuda`` if ``decision`` is to build it."""
    import pybind11
    from torch.utils.cpp_extension import CppExtension, CUDAExtension

    sanitized = []
    if os.environ.get("ESPER_SANITIZERS") == "1":
        sanitized = SANITIZED
    shared: dict[str, Any] = {
        # A change of any header rebuilds, and an sdist carries them.
        "depends": _sources("csrc/**/*.h") + _sources("csrc/**/*.cuh"),
        "py_limited_api": True,
    }
    found = [
        CppExtension(
            "esper._C",
            ["csrc/library.cpp", *_sources("csrc/cpu/*.cpp"), *_sources("csrc/tape/*.cpp")],
            extra_compile_args={"cxx": [*CXX_FLAGS, TORCH_TARGET, *sanitized]},
            extra_link_args=sanitized,
            **shared,
        ),
        # pybind11 and nothing of torch: this module owns threads and handles, never tensors.
        Extension(
            "esper._runtime",
            _sources("csrc/runtime/*.cpp"),
            include_dirs=[pybind11.get_include()],
            depends=_sources("csrc/runtime/*.h"),
            extra_compile_args=[*CXX_FLAGS, *sanitized],
            extra_link_args=sanitized,
            language="c++",
        ),
    ]
    if decision.build:
        found.append(
            CUDAExtension(
                "esper._C_cuda",
                _sources("csrc/cuda/*.cu"),
                extra_compile_args={
                    "cxx": [*CXX_FLAGS, TORCH_TARGET, "-DUSE_CUDA"],
                    "nvcc": NVCC_FLAGS,
                },
                **shared,
            )
        )
    return found


def build_command(decision: cuda.CudaDecision, architectures: str | None) -> type:
    """Returns torch's ``build_ext`` with a lasting object folder, a record of the build and no stale modules."""
    from torch.utils.cpp_extension import BuildExtension

    class BuildEsper(BuildExtension):  # type: ignore[misc]  # torch does not type it
        def finalize_options(self) -> None:
            super().finalize_options()
            # One lasting folder per torch and Python: ninja then recompiles only what changed.
            self.build_temp = str(ROOT / "build" / f"objects-torch{torch.__version__}-{sys.implementation.cache_tag}")

        def run(self) -> None:
            print(f"esper: CUDA kernels {'on' if decision.build else 'off'}: {decision.reason}")
            folders = [Path(self.build_lib, "esper")]
            if self.inplace or self.editable_mode:
                folders.append(ROOT / "esper")
            for folder in folders:
                remove_stale(folder, {extension.name for extension in self.extensions})
            super().run()
            record = json.dumps(build_record(decision, architectures), indent=2) + "\n"
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "_build_info.json").write_text(record)

    return BuildEsper


def remove_stale(folder: Path, building: set[str]) -> None:
    """Deletes compiled modules that this build does not make: they hold kernels of another build."""
    for name in ("_C", "_C_cuda", "_runtime"):
        if f"esper.{name}" not in building:
            for path in folder.glob(f"{name}.*so"):
                path.unlink()


def build_record(decision: cuda.CudaDecision, architectures: str | None) -> dict[str, Any]:
    """Returns the record of this build that ``esper info`` prints."""
    return {
        "torch": torch.__version__,
        "torch_target": "2.11",
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cxx_flags": CXX_FLAGS,
        "cuda": {
            "built": decision.build,
            "reason": decision.reason,
            "torch_cuda": torch.version.cuda,
            "architectures": architectures,
        },
    }
