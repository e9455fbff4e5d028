"""Devices of kernel tests: the CPU, a GPU, and the CUDA kernels on the CPU through the emulator."""

import contextlib
import ctypes
import importlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.emulation.build import EmulatedLibrary

SANITIZERS = "ESPER_EMULATION_SANITIZERS"  # a variable that test_sanitizers.py sets for its processes
SEEDS = (0, 1)  # one of each kind of order, see runtime.cpp


class KernelDevice(ABC):
    """A device of the tensors of a kernel test."""

    torch: torch.device
    """where the tensors of a test go"""

    @abstractmethod
    def launched(self, run: Callable[[], object]) -> list[str]:
        """Names of the kernels and memsets that ``run`` launches, in order."""

    @abstractmethod
    def captured(self, run: Callable[[], object]) -> Callable[[], None]:
        """A function that launches again what ``run`` launches, with the kernel arguments of now.

        ``run`` must allocate nothing that its kernels use, and do nothing but call operators of Esper.
        """

    @abstractmethod
    def cpu_kernels(self) -> contextlib.AbstractContextManager[None]:
        """A context in which tensors on the CPU go to the CPU kernels."""

    @abstractmethod
    def few_blocks(
        self, kernel: str, most: int
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which launches of ``kernel`` have at most ``most`` blocks; a GPU launches them all."""


class CPU(KernelDevice):
    """The CPU with its kernels, which are not launched."""

    def __init__(self) -> None:
        self.torch = torch.device("cpu")

    def launched(self, run: Callable[[], object]) -> list[str]:
        raise NotImplementedError("kernels on the CPU are called")

    def captured(self, run: Callable[[], object]) -> Callable[[], None]:
        raise NotImplementedError("calls on the CPU are not captured")

    def cpu_kernels(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to do."""
        return contextlib.nullcontext()

    def few_blocks(
        self, kernel: str, most: int
    ) -> contextlib.AbstractContextManager[None]:
        """Nothing to do."""
        return contextlib.nullcontext()


class GPU(KernelDevice):
    """The first CUDA device."""

    def __init__(self) -> None:
        self.torch = torch.device("cuda")

    def launched(self, run: Callable[[], object]) -> list[str]:
        """Names as the profiler reports them."""
        run()
        torch.cuda.synchronize()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA]
        ) as profile:
            run()
            torch.cuda.synchronize()
        return [
            event.name
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]

    def captured(self, run: Callable[[], object]) -> Callable[[], None]:
        """A replay of a CUDA graph."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def cpu_kernels(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to do."""
        return contextlib.nullcontext()

    def few_blocks(
        self, kernel: str, most: int
    ) -> contextlib.AbstractContextManager[None]:
        """Nothing to do."""
        return contextlib.nullcontext()


class Emulator(KernelDevice):
    """A loaded library of emulated kernels. It serves ``torch.ops.esper`` between ``__enter__`` and ``__exit__``."""

    def __init__(self, library: EmulatedLibrary) -> None:
        self.torch = torch.device("cpu")
        self.library = library
        # The schemas first: the shared library only has kernels.
        self._definitions = torch.library.Library(library.namespace, "DEF")
        for name in library.operators:
            schema = str(_operator("esper", name)._schema).removeprefix("esper::")
            self._definitions.define(schema)
            self._definitions.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.ops.load_library(str(library.path))
        self._runtime = ctypes.CDLL(str(library.path))
        self._runtime.emulated_set_seed.argtypes = [ctypes.c_uint64]
        self._runtime.emulated_take_log.restype = ctypes.c_char_p
        self._runtime.emulated_limit_blocks.argtypes = [ctypes.c_char_p, ctypes.c_uint]
        self._runtime.emulated_replay.restype = ctypes.c_char_p
        self._overrides: torch.library.Library | None = None

    @contextlib.contextmanager
    def serving(self, seed: int) -> Iterator["Emulator"]:
        """Makes the emulated kernels those of ``torch.ops.esper`` on the CPU.

        New memory of tensors is filled with NaN in the block, so that reads of unwritten memory are found, and
        ``grad_stats`` makes the scratch memory that its CUDA kernel needs.
        """
        grad_stats = importlib.import_module("esper.ops.grad_stats")
        with pytest.MonkeyPatch.context() as patch, _garbage_in_new_tensors():
            patch.setattr(grad_stats, "_SCRATCH_DEVICE", "cpu")
            self._runtime.emulated_set_seed(seed)
            self._override()
            try:
                yield self
            finally:
                self._restore()

    def _override(self) -> None:
        self._overrides = torch.library.Library("esper", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore",
                "Warning only once for all operators,  other operators may also be overrid",
            )
            for name in self.library.operators:
                self._overrides.impl(
                    name, _operator(self.library.namespace, name), "CPU"
                )

    def _restore(self) -> None:
        assert self._overrides is not None
        self._overrides._destroy()
        self._overrides = None

    def launched(self, run: Callable[[], object]) -> list[str]:
        """Names as the emulator ran them."""
        self._runtime.emulated_take_log()
        run()
        return self._runtime.emulated_take_log().decode().splitlines()

    def captured(self, run: Callable[[], object]) -> Callable[[], None]:
        """The launches with copies of their arguments."""
        self._runtime.emulated_begin_capture()
        try:
            run()
        finally:
            self._runtime.emulated_end_capture()
        return self._replay

    def _replay(self) -> None:
        error = self._runtime.emulated_replay()
        if error is not None:
            raise RuntimeError(error.decode())

    @contextlib.contextmanager
    def cpu_kernels(self) -> Iterator[None]:
        """Removes the overrides during the block."""
        self._restore()
        try:
            yield
        finally:
            self._override()

    @contextlib.contextmanager
    def few_blocks(self, kernel: str, most: int) -> Iterator[None]:
        """Lowers the number of blocks of each launch."""
        self._runtime.emulated_limit_blocks(kernel.encode(), most)
        try:
            yield
        finally:
            self._runtime.emulated_limit_blocks(kernel.encode(), 0)


def _operator(namespace: str, name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(
        getattr(getattr(torch.ops, namespace), packet), overload or "default"
    )


@contextlib.contextmanager
def _garbage_in_new_tensors() -> Iterator[None]:
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
