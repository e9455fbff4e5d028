"""The emulated kernels under address and undefined-behaviour sanitizers, which end the process at a report."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulation.build import ROOT, Edit, build, compiler
from tests.emulation.device import SANITIZERS

pytestmark = pytest.mark.slow


def run_sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments and libasan preloaded."""
    asked = [compiler(), "-print-file-name=libasan.so"]
    library = Path(
        subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    )
    assert library.is_absolute(), (
        f"{compiler()} has no libasan.so; install the compiler's sanitizer libraries"
    )
    environment = {
        **os.environ,
        SANITIZERS: "1",
        "LD_PRELOAD": str(library),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )


def test_the_odd_shapes_of_every_kernel_give_no_report() -> None:
    build(sanitizers=True)  # here, because a compiler with libasan preloaded is slow
    files = [
        str(path.relative_to(ROOT))
        for path in sorted(ROOT.glob("tests/cuda/test_*.py"))
    ]
    options = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "sanitizer and not cuda",
    ]
    finished = run_sanitized(*options, *files)
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
    assert " passed" in finished.stdout


SCRIPT = """
import torch
from tests.cuda import test_grad_stats, test_optimizer
from tests.emulation.build import Edit, build
from tests.emulation.device import Emulator
emulator = Emulator(build([{unit!r}], namespace={namespace!r}, edits=[Edit(*{edit!r})], sanitizers=True))
with emulator.serving(0):
    {call}
"""


@pytest.mark.parametrize(
    ("unit", "edit", "call", "report"),
    [
        (
            "sgd",
            ("cuda/sgd.cu", "i < end; i += kThreads", "i <= end; i += kThreads"),
            "test_optimizer.test_sizes_around_chunks_for_sgd(emulator, test_optimizer.CHUNK)",
            "READ of size 4",
        ),
        (
            "grad_stats",
            (
                "cuda/reduce.cuh",
                "w < kThreads / 32; ++w) add(sum",
                "w <= kThreads / 32; ++w) add(sum",
            ),
            "test_grad_stats.test_sizes_around_vectors_and_chunks(emulator, torch.float32, 5)",
            "READ of size 8",
        ),
        (
            "grad_stats",
            (
                "cuda/reduce.cuh",
                "__shared__ T warps[kThreads / 32];",
                "__shared__ T warps[kThreads / 32 - 1];",
            ),
            "test_grad_stats.test_sizes_around_vectors_and_chunks(emulator, torch.float32, 5)",
            "WRITE of size 40",
        ),
    ],
    ids=["past_a_tensor", "past_a_shared_array", "a_short_shared_array"],
)
def test_an_access_out_of_bounds_is_reported(
    unit: str, edit: tuple[str, str, str], call: str, report: str
) -> None:
    namespace = f"esper_sanitized_{unit}"
    build([unit], namespace=namespace, edits=[Edit(*edit)], sanitizers=True)
    finished = run_sanitized(
        "-c", SCRIPT.format(unit=unit, namespace=namespace, edit=edit, call=call)
    )
    assert finished.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in finished.stderr, finished.stderr[
        -4000:
    ]
    assert report in finished.stderr, finished.stderr[-4000:]
    assert f"csrc/{edit[0]}:" in finished.stderr
