"""The device of kernel tests that run on the CPU here, and on a GPU or emulated in ``tests/cuda``."""

import pytest

from tests.emulation.device import CPU, KernelDevice


@pytest.fixture
def device() -> KernelDevice:
    """The CPU, with its kernels."""
    return CPU()
