"""The fake CUDA runtime of this process, by its functions for the harness."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

NAME = "libcudart.so.13"

# PyDLL keeps Python's lock, which is right for calls that are short; whatever may do queued work must not.
_short = ctypes.PyDLL(NAME)
_long = ctypes.CDLL(NAME)
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_long)
_kept: list[object] = []
"""Callbacks, which C knows by their address only."""

_short.rehearsal_submit.argtypes = (ctypes.c_void_p, ctypes.c_long)
_short.rehearsal_block.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
_short.rehearsal_block.restype = ctypes.c_ulong
_short.rehearsal_is_pinned.argtypes = (ctypes.c_void_p,)
_short.rehearsal_is_capturing.argtypes = (ctypes.c_void_p,)
_short.rehearsal_order.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
_short.rehearsal_context.restype = ctypes.c_char_p
_short.rehearsal_count.restype = ctypes.c_long
_short.rehearsal_count.argtypes = (ctypes.c_char_p,)
_long.rehearsal_drain.argtypes = (ctypes.c_void_p,)

Stream = int
"""A ``cudaStream_t``; 0 is the default stream of the current device."""


def set_callback(run: Callable[[int], None]) -> None:
    """Call ``run`` with the number of each action that is submitted, when its stream comes to it."""
    callback = _Callback(run)
    _kept.append(callback)
    _short.rehearsal_set_callback(callback)


def seed(number: int) -> None:
    """Seed the order in which streams are interleaved."""
    _short.rehearsal_seed(number)


def submit(stream: Stream, number: int) -> int:
    """Queue an action on ``stream``, or put it into the stream's capture; returns a CUDA error code."""
    return int(_short.rehearsal_submit(stream, number))


def drain(stream: Stream) -> None:
    """Do all that ``stream`` has been given."""
    _long.rehearsal_drain(stream)


def drain_all() -> None:
    """Do all that any stream has been given."""
    _long.rehearsal_drain_all()


def order(before: Stream, after: Stream) -> None:
    """Let what comes later on ``after`` wait for all that ``before`` has been given."""
    _short.rehearsal_order(before, after)


def is_capturing(stream: Stream) -> bool:
    """Whether a capture of ``stream`` is under way."""
    return bool(_short.rehearsal_is_capturing(stream))


def is_pinned(address: int) -> bool:
    """Whether this is page-locked memory of the CPU."""
    return bool(_short.rehearsal_is_pinned(address))


def block(address: int) -> tuple[int, int]:
    """(serial number, device) of the allocation at ``address``; the number is 0 if there is none."""
    device = ctypes.c_int(-1)
    serial = _short.rehearsal_block(address, ctypes.byref(device))
    return int(serial), device.value


def begin_operator() -> None:
    """From here on, launches and copies of this thread have no effect of their own."""
    _short.rehearsal_begin_operator()


def end_operator() -> tuple[int, Stream]:
    """(number of streams that the operator used, the first of them)."""
    stream = ctypes.c_void_p()
    count = _short.rehearsal_end_operator(ctypes.byref(stream))
    return int(count), stream.value or 0


def take_released(room: int = 256) -> Iterator[int]:
    """Numbers of actions that can never run again."""
    numbers = (ctypes.c_long * room)()
    count = room
    while count == room:
        count = _short.rehearsal_take_released(numbers, room)
        yield from numbers[:count]


def take_complaints() -> list[str]:
    """Broken rules that no error code of CUDA tells, since the last call."""
    found, text = [], ctypes.create_string_buffer(512)
    while _short.rehearsal_take_complaint(text, len(text)):
        found.append(text.value.decode())
    return found


def context(device: int) -> str:
    """The runtime call that made the primary context of ``device``; empty if the device has none."""
    made_by = _short.rehearsal_context(device)
    return made_by.decode() if made_by else ""


def count(what: str) -> int:
    """How often something happened: operators, kernel launches, graph launches, captures, broken captures, waits."""
    return int(_short.rehearsal_count(what.encode()))
