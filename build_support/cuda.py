"""The decision whether CUDA kernels can be built, made by building one."""

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

# Used on a machine without a GPU: A100, H100 and, through PTX, anything newer.
DEFAULT_ARCHITECTURES = "8.0;9.0+PTX"

_PROBE = """#include <cuda_runtime.h>
static_assert(CUDART_VERSION / 1000 == {major}, "this toolkit's CUDA major version differs from torch's");
__global__ void probe(int* out) {{ *out = 1; }}
"""


@dataclass(frozen=True)
class CudaDecision:
    """Whether to build the CUDA module, with which toolkit, and why."""

    build: bool
    reason: str
    home: Path | None = None


def toolkit_candidates(environment: dict[str, str]) -> list[Path]:
    """Returns the CUDA toolkits on this machine, the user's choice first.

    A directory counts only with the runtime header and a compiler: an nvcc on the PATH may be a wrapper far from both.
    """
    named = [Path(environment[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    nvcc = shutil.which("nvcc", path=environment.get("PATH"))
    found = [Path(nvcc).resolve().parent.parent] if nvcc else []
    # Newest first: cuda-13.0 before cuda-12.8.
    versioned = sorted(
        Path("/usr/local").glob("cuda-*"), key=lambda p: [int(n) for n in re.findall(r"\d+", p.name)], reverse=True
    )
    candidates = [*named, *found, Path("/usr/local/cuda"), *versioned]
    return list(
        dict.fromkeys(p for p in candidates if (p / "include/cuda_runtime.h").is_file() and (p / "bin/nvcc").is_file())
    )


def compile_probe(home: Path, major: int) -> str | None:
    """Compiles a three-line kernel with the toolkit at ``home``; returns None, or the compiler's complaint."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cu")
        source.write_text(_PROBE.format(major=major))
        command = [str(home / "bin/nvcc"), "-c", str(source), "-o", str(Path(folder, "probe.o"))]
        if "CC" in os.environ:
            command += ["-ccbin", os.environ["CC"]]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    lines = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line.lower()]
    return lines[0].strip() if lines else f"nvcc ended with status {done.returncode}"


def decide(torch_cuda: str | None, environment: dict[str, str]) -> CudaDecision:
    """Decides whether the CUDA module can be built against a torch built for CUDA ``torch_cuda``.

    ``ESPER_CUDA`` is ``auto`` (build if possible, the default), ``0`` (never) or ``1`` (or fail).
    """
    mode = environment.get("ESPER_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        raise SystemExit(f"ESPER_CUDA={mode!r} is not one of: auto (build if possible), 0 (never), 1 (or fail)")
    if mode == "0":
        return CudaDecision(False, "switched off by ESPER_CUDA=0")
    decision = _look(torch_cuda, environment)
    if mode == "1" and not decision.build:
        raise SystemExit(f"ESPER_CUDA=1 asks for CUDA kernels, but they cannot be built: {decision.reason}")
    return decision


def _look(torch_cuda: str | None, environment: dict[str, str]) -> CudaDecision:
    if torch_cuda is None:
        return CudaDecision(False, "the installed torch is a CPU build")
    major = int(torch_cuda.split(".")[0])
    homes = toolkit_candidates(environment)
    if not homes:
        return CudaDecision(
            False, f"no CUDA {major} toolkit found (set CUDA_HOME to one with bin/nvcc and include/cuda_runtime.h)"
        )
    complaints = []
    for home in homes:
        complaint = compile_probe(home, major)
        if complaint is None:
            return CudaDecision(True, f"a test kernel compiled with {home.name}", home)
        complaints.append(f"{home.name}: {complaint}")
    return CudaDecision(False, f"no toolkit can compile for torch's CUDA {torch_cuda} ({'; '.join(complaints)})")
