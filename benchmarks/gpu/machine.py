"""Describe the machine, or say why nothing can be checked on it.

    python -m benchmarks.gpu.machine FILE.json

Writes lines for people as a JSON list. Exit status: 0, or 77 if there is no GPU, no torch or no CUDA toolkit.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from benchmarks.gpu.runner import ROOT, SKIP
from build_support import cuda


def output(*command: str) -> str:
    """Last line that a command prints, or "unknown" if it cannot say."""
    if shutil.which(command[0]) is None:
        return f"no {Path(command[0]).name}"
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = done.stdout.strip().splitlines()
    return lines[-1].strip() if lines and done.returncode == 0 else "unknown"


def processor() -> str:
    """Model of the processor."""
    lines = (
        Path("/proc/cpuinfo").read_text().splitlines()
        if Path("/proc/cpuinfo").is_file()
        else []
    )
    return next(
        (
            line.partition(":")[2].strip()
            for line in lines
            if line.startswith("model name")
        ),
        platform.machine(),
    )


def describe() -> list[str]:
    """Hardware, driver and versions, a line each. Raises ImportError without torch."""
    import torch

    gpus = [
        torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())
    ]
    homes = cuda.toolkit_candidates(dict(os.environ))
    toolkit = output(str(homes[0] / "bin/nvcc"), "--version") if homes else "none"
    packages = ("numpy", "pytest", "pydantic", "gymnasium", "scipy")
    there = {
        d.metadata["Name"].lower(): d.version
        for d in metadata.distributions()
        if d.metadata["Name"]
    }
    return [
        *(
            f"GPU: {gpu.name}, {gpu.total_memory / 2**30:.1f} GiB, sm_{gpu.major}{gpu.minor}"
            for gpu in gpus
        ),
        f"Driver: {output('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader')}",
        f"CUDA toolkit: {toolkit}; {output('compute-sanitizer', '--version')}",
        f"PyTorch {torch.__version__}, CUDA {torch.version.cuda or 'not in this torch'}, "
        f"cuDNN {torch.backends.cudnn.version() or 'not in this torch'}",
        f"Python {platform.python_version()}; "
        + ", ".join(f"{name} {there.get(name, 'is missing')}" for name in packages),
        f"{processor()}, {os.cpu_count()} cores; {platform.platform()}",
        f"Esper at commit {output('git', 'rev-parse', '--short', 'HEAD')}",
    ]


def obstacle() -> str | None:
    """Returns the reason that no step can run here, or None."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if not torch.cuda.is_available():
        return "no GPU that torch can use"
    if not cuda.toolkit_candidates(dict(os.environ)):
        return "no CUDA toolkit with nvcc"
    return None


def main() -> int:
    """Write the description; return the exit status."""
    reason = obstacle()
    lines = [reason] if reason and reason.startswith("torch") else describe()
    Path(sys.argv[1]).write_text(json.dumps(lines, indent=2) + "\n")
    print(*lines, sep="\n")
    if reason:
        print(reason)
        return SKIP
    return 0


if __name__ == "__main__":
    sys.exit(main())
