"""Build script; everything that does not need code is in pyproject.toml."""

import os
import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).resolve().parent))  # build front ends do not put it there

from build_support import find_torch


def compiled() -> dict[str, object]:
    """Returns the setup() arguments that build the modules; imports torch."""
    if not find_torch.torch_is_there():
        raise SystemExit(
            "esper compiles against torch, and none is installed. Type: "
            f"pip install {find_torch.FALLBACK_TORCH} -e .   (without --no-build-isolation)"
        )
    import torch

    if find_torch.is_too_old(torch.__version__):
        raise SystemExit(
            f"esper needs torch 2.11 or newer, and {torch.__version__} is installed. Type first: "
            f"pip install {find_torch.FALLBACK_TORCH}"
        )

    from build_support import cuda

    decision = cuda.decide(torch.version.cuda, dict(os.environ))
    from build_support import extensions

    architectures = extensions.prepare_cuda(decision) if decision.build else None
    return {
        "ext_modules": extensions.modules(decision),
        "cmdclass": {"build_ext": extensions.build_command(decision, architectures)},
    }


find_torch.see_target_packages()
arguments: dict[str, object] = {}
if find_torch.is_build(sys.argv):
    arguments = compiled()
elif not find_torch.torch_is_there():
    arguments = {"setup_requires": [find_torch.FALLBACK_TORCH]}

setup(**arguments)
