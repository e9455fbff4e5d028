"""The fake CUDA runtime of this process, by its functions for the harness."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

NAME = "libcudart.so.13"

# PyDLL keeps Python's lock, which is right for calls that are short; whatever may do queued work must not.
_short = ctypes.PyDLL(NAME)
_long = ctypes.CDLL(NAME)
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_long)
_kept: list[object] = []
"""Callbacks, which C knows by their address only."""

_short.rehearsal_submit.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
)
_short.rehearsal_is_pinned.argtypes = (ctypes.c_void_p,)
_short.rehearsal_is_capturing.argtypes = (ctypes.c_int, ctypes.c_void_p)
_short.rehearsal_order.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_void_p,
)
_short.rehearsal_context.restype = ctypes.c_char_p
_short.rehearsal_count.restype = ctypes.c_long
_short.rehearsal_count.argtypes = (ctypes.c_char_p,)
_long.rehearsal_drain.argtypes = (ctypes.c_int, ctypes.c_void_p)

Place = tuple[int, int]
"""A stream: its device, and its ``cudaStream_t``, which is 0 for the device's default stream."""


def set_callback(run: Callable[[int], None]) -> None:
    """Call ``run`` with the number of each action that is submitted, when its stream comes to it."""
    callback = _Callback(run)
    _kept.append(callback)
    _short.rehearsal_set_callback(callback)


def seed(number: int) -> None:
    """Seed the order in which streams are interleaved."""
    _short.rehearsal_seed(number)


def submit(place: Place, number: int, addresses: Sequence[int], across: bool) -> int:
    """Queue an action, or put it into the stream's capture; returns a CUDA error code.

    Args:
        place: the stream.
        number: of the action.
        addresses: device memory that the action touches, which must still be allocated when it runs.
        across: whether memory of several devices is meant.
    """
    array = (ctypes.c_void_p * len(addresses))(*addresses)
    return int(_short.rehearsal_submit(*place, number, array, len(addresses), across))


def drain(place: Place) -> None:
    """Do all that the stream has been given."""
    _long.rehearsal_drain(*place)


def drain_all() -> None:
    """Do all that any stream has been given."""
    _long.rehearsal_drain_all()


def order(before: Place, after: Place) -> None:
    """Let what comes later on the stream ``after`` wait for all that ``before`` has been given."""
    _short.rehearsal_order(*before, *after)


def is_capturing(place: Place) -> bool:
    """Whether a capture of the stream is under way."""
    return bool(_short.rehearsal_is_capturing(*place))


def is_pinned(address: int) -> bool:
    """Whether this is page-locked memory of the CPU."""
    return bool(_short.rehearsal_is_pinned(address))


def begin_operator() -> None:
    """From here on, launches and copies of this thread have no effect of their own."""
    _short.rehearsal_begin_operator()


def end_operator() -> tuple[int, int]:
    """(number of streams that the operator used, the handle of the first)."""
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
    """Number of operators, kernel launches, graph launches, captures, broken captures or waits."""
    return int(_short.rehearsal_count(what.encode()))
