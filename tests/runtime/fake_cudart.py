"""Compiles a CUDA runtime without a device, and reads its record of calls."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_cudart.c")


class Launch(ctypes.Structure):
    graph: int
    stream: int
    device: int
    _fields_ = (
        ("graph", ctypes.c_ssize_t),
        ("stream", ctypes.c_ssize_t),
        ("device", ctypes.c_int),
    )


class Call(ctypes.Structure):
    name: int
    device: int
    first: int
    second: int
    _fields_ = (
        ("name", ctypes.c_int),
        ("device", ctypes.c_int),
        ("first", ctypes.c_ssize_t),
        ("second", ctypes.c_ssize_t),
    )


def compile_fake(folder: Path, name: str = "libfakecudart.so", *options: str) -> Path:
    """The library in ``folder``; skips where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    path = folder / name
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wall", *options, str(SOURCE), "-o", str(path)],
        check=True,
    )
    return path


class Fake:
    """The variables of a loaded library by their names without ``fake_``, and its calls as tuples."""

    def __init__(self, path: Path) -> None:
        self.__dict__["path"] = str(path)
        self.__dict__["library"] = ctypes.CDLL(str(path))

    def _variable(self, name: str) -> ctypes.c_int | ctypes.c_ssize_t:
        kind = ctypes.c_ssize_t if name in ("bad_graph", "bad_stream") else ctypes.c_int
        try:
            return kind.in_dll(self.library, f"fake_{name}")
        except ValueError as error:
            raise AttributeError(name) from error

    def __getattr__(self, name: str) -> int:
        return self._variable(name).value

    def __setattr__(self, name: str, value: int) -> None:
        self._variable(name).value = value

    @property
    def current_device(self) -> int:
        """Current device of the calling thread."""
        number = ctypes.c_int()
        self.library.cudaGetDevice(ctypes.byref(number))
        return number.value

    @property
    def contexts(self) -> set[int]:
        """Devices that a context was made on."""
        return {device for device in range(8) if self.context_bits >> device & 1}

    @property
    def launches(self) -> list[tuple[int, int]]:
        """(graph, stream) of all that succeeded."""
        array = (Launch * self.launch_count).in_dll(self.library, "fake_launches")
        return [(launch.graph, launch.stream) for launch in array]

    @property
    def launch_devices(self) -> set[int]:
        return {
            launch.device
            for launch in (Launch * self.launch_count).in_dll(
                self.library, "fake_launches"
            )
        }

    @property
    def calls(self) -> list[tuple[str, int, int, int]]:
        """(letter, device, first argument, second argument) of calls that create streams."""
        array = (Call * self.call_count).in_dll(self.library, "fake_calls")
        return [
            (chr(call.name), call.device, call.first, call.second) for call in array
        ]
