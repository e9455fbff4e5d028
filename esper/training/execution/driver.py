"""The NVIDIA driver: which CUDA it serves, and what Esper's kernels need of it."""

from __future__ import annotations

from esper._runtime import CudaRuntime

LARGE_ARGUMENTS = 12010
"""The first CUDA version, as CUDA writes it (1000 · major + 10 · minor), in which kernels take 32,764 bytes of
arguments. Earlier ones take 4,096."""

DRIVER = 530
"""The first driver for that version."""

VOLTA = (7, 0)
"""The first compute capability that does."""

STATS_TENSORS, SGD_TENSORS = 128, 40
"""Tensors whose table of pointers fits 4,096 bytes: gradient statistics (csrc/cuda/grad_stats.cu), SGD (sgd.cu)."""


def version() -> int | None:
    """The newest CUDA version that the driver serves, as CUDA writes it; None without a CUDA runtime or a driver."""
    try:
        return CudaRuntime().driver_version() or None
    except RuntimeError:
        return None


def written(version: int) -> str:
    """As people write it: 12010 is 12.1."""
    return f"{version // 1000}.{version % 1000 // 10}"


def missing(driver: int | None, capability: tuple[int, int]) -> str | None:
    """What a GPU of that compute capability lacks with that driver, and what repairs it; None: nothing."""
    if driver is None:
        return None
    needs = (
        f"a step of more than {SGD_TENSORS} tensors, and gradient statistics of more than {STATS_TENSORS}, take kernel "
        "arguments of more than 4,096 bytes"
    )
    if capability < VOLTA:
        found, least = (".".join(map(str, pair)) for pair in (capability, VOLTA))
        return f"{needs}, which compute capability {found} does not have; it needs a GPU of {least} or newer"
    if driver < LARGE_ARGUMENTS:
        return (
            f"{needs}, which its driver does not have: it serves CUDA {written(driver)}, and CUDA "
            f"{written(LARGE_ARGUMENTS)} is needed; install NVIDIA driver {DRIVER} or newer"
        )
    return None
