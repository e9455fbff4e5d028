"""The emulator reports misuse that CUDA leaves undefined, with file and line, and continues afterwards."""

import ctypes
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.emulation.build import build

SOURCE = Path(__file__).parents[1] / "emulation" / "misuse.cu"


def line_of(kernel: str, statement: str) -> str:
    """``misuse.cu:LINE`` of the first such statement in a kernel."""
    lines = SOURCE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if f" {kernel}(" in line)
    return f"misuse.cu:{next(i for i in range(start, len(lines)) if statement in lines[i]) + 1}"


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return ctypes.CDLL(
        str(build(["misuse"], namespace="esper_misuse", extra=[SOURCE]).path)
    )


@pytest.fixture(scope="module", params=[0, 1])
def error_of(
    request: pytest.FixtureRequest, library: ctypes.CDLL
) -> Callable[[str], str]:
    """The report of a case of misuse.cu, which must not be missing."""
    library.emulated_set_seed(ctypes.c_uint64(request.param))
    library.misuse.restype = ctypes.c_char_p

    def run(name: str) -> str:
        found = library.misuse(name.encode())
        assert found is not None, f"{name} was not reported"
        assert library.misuse(b"nothing") is None, "a launch after the error"
        return str(found.decode())

    return run


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "too many threads",
            r"a block has 1 to 1024 threads, .* and this one has \(1025, 1, 1\)",
        ),
        ("no blocks", r"a grid has at least one block .* and this one has \(0, 1, 1\)"),
        (
            "too much dynamic shared memory",
            "at most 49152 bytes of shared memory, and this launch asks for 49153",
        ),
    ],
)
def test_a_launch_that_cuda_refuses_is_an_error(
    error_of: Callable[[str], str], name: str, message: str
) -> None:
    error = error_of(name)
    assert re.search(message, error), error
    assert re.search(r"nothing, launched at tests/emulation/misuse.cu:\d+", error)


@pytest.mark.parametrize(
    ("name", "kernel", "statement", "message"),
    [
        (
            "more threads than the launch bounds",
            "bounded",
            "{",
            "allows 64 threads, and the block has 65",
        ),
        (
            "half at the barrier",
            "half_at_the_barrier",
            "__sync",
            "deadlock: 32 threads .* have ended .* 32 threads .*",
        ),
        (
            "two barriers",
            "two_barriers",
            "__sync",
            "a barrier is not for all threads of the block",
        ),
        (
            "half at the shuffle",
            "half_at_the_shuffle",
            "__shfl",
            "deadlock: 48 threads .* wait at the barrier .*; 16",
        ),
        (
            "two offsets",
            "two_offsets",
            "__shfl",
            "different shuffles: this one at .* by [12], others at .* by [12]",
        ),
        (
            "outside of the mask",
            "outside_of_the_mask",
            "__shfl",
            "is not in the mask of the shuffle",
        ),
        (
            "misaligned load",
            "misaligned_load",
            "__ldg",
            "a load of 16 bytes from an address that is not aligned",
        ),
        (
            "index too large",
            "index_too_large",
            "] = 1",
            r"index 32 is outside of an array of type 'int *\[32\]'",
        ),
        (
            "too much shared memory",
            "too_much_shared_memory",
            "many[",
            "many at .* takes 51200 beside 0",
        ),
    ],
)
def test_misuse_in_a_kernel_is_an_error_with_its_line(
    error_of: Callable[[str], str], name: str, kernel: str, statement: str, message: str
) -> None:
    error = error_of(name)
    assert re.search(message, error), error
    assert f"emulated CUDA: {kernel}, launched at" in error
    assert line_of(kernel, statement) in error, error


def test_a_write_past_shared_memory_is_an_error(error_of: Callable[[str], str]) -> None:
    assert (
        "block 0 has written outside of the dynamic shared memory, 64 bytes"
        in error_of("pointer too far")
    )


def test_shared_memory_starts_as_garbage(library: ctypes.CDLL) -> None:
    library.garbage.restype = ctypes.c_float
    found = {str(library.garbage()) for _ in range(20)}
    assert len(found) == 2
    assert all(math.isnan(float(value)) or float(value) < -1e6 for value in found)
