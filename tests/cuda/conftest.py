"""Devices of the kernel tests; tests marked ``cuda`` are skipped without a GPU.

The kernel files take the fixture ``device`` and so run on a GPU, if there is one, and always in the emulator. Tests
marked ``cuda`` need a GPU with Esper's CUDA module and say why they are skipped where it is missing.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from esper.ops import _native
from tests.emulation.build import build
from tests.emulation.device import GPU, SANITIZERS, SEEDS, Emulator, KernelDevice

_EMULATED = [pytest.param(seed, id=f"emulated-{seed}") for seed in SEEDS]
_ON_GPU = (
    [pytest.param("cuda", id="cuda", marks=pytest.mark.cuda)]
    if torch.cuda.is_available()
    else []
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    take_seeds_in_turn(items)
    cuda = next(
        report for report in _native.modules() if report.name == "esper._C_cuda"
    )
    if torch.cuda.is_available() and cuda.loaded:
        return
    reason = (
        "no GPU"
        if not torch.cuda.is_available()
        else f"esper._C_cuda is missing: {cuda.reason}"
    )
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason=reason))


def take_seeds_in_turn(items: list[pytest.Item]) -> None:
    """Neighbouring cases of a test run with another seed each, and with the others in the slow suite."""
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        seed = parameters.get("device")
        if item.path.parent == Path(__file__).parent and seed in SEEDS:
            cases.setdefault((item.nodeid.partition("[")[0], seed), []).append(item)
    for (_, seed), found in cases.items():
        for item in found[SEEDS.index(seed) :: len(SEEDS)]:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def emulator() -> Emulator:
    return Emulator(build(sanitizers=SANITIZERS in os.environ))


@pytest.fixture(params=[*_ON_GPU, *_EMULATED])
def device(request: pytest.FixtureRequest) -> Iterator[KernelDevice]:
    """Device of the CUDA kernels: the GPU, or the emulator with one of its seeds."""
    if request.param == "cuda":
        yield GPU()
        return
    emulator: Emulator = request.getfixturevalue("emulator")
    with emulator.serving(request.param):
        yield emulator
