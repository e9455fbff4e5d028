"""The order of work on streams, and accesses of memory that are in no order."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

Stream = Hashable
"""None is the stream that is current where no other is."""

Span = tuple[int, int]


class StreamOrder:
    """Vector clocks: for each stream, how much of the work of every stream comes before its next piece of work."""

    def __init__(self) -> None:
        self.clocks: defaultdict[Stream, Counter[Stream]] = defaultdict(Counter)
        self.known: Counter[Stream] = Counter()
        """Work that the CPU has waited for; any work that it queues later comes after it."""

    def work(self, stream: Stream) -> int:
        """Puts one piece of work on ``stream`` and returns its number there."""
        self.clocks[stream][stream] += 1
        return self.clocks[stream][stream]

    def now(self, stream: Stream) -> Counter[Stream]:
        """All work that is done once ``stream`` has done what it was given so far."""
        return Counter(self.clocks[stream])

    def wait(self, stream: Stream, earlier: Counter[Stream]) -> None:
        """Later work on ``stream`` comes after ``earlier``."""
        self.clocks[stream] |= earlier

    def synchronize(self) -> None:
        """The CPU waits for all streams."""
        for clock in self.clocks.values():
            self.known |= clock

    def before(self, stream: Stream, other: Stream, number: int) -> bool:
        """Whether work ``number`` of ``other`` comes before the next work on ``stream``."""
        return max(self.clocks[stream][other], self.known[other]) >= number


@dataclass
class _Last:
    """Numbers of the last write and the last read, by stream."""

    writes: dict[Stream, int]
    reads: dict[Stream, int]


class Accesses(TorchDispatchMode):
    """Notes which stream reads and writes the tensors that exist when it is entered, and finds what is in no order.

    Args:
        order: the order of streams.
        current: the stream that work is put on.
    """

    def __init__(self, order: StreamOrder, current: Callable[[], Stream]) -> None:
        super().__init__()
        self.order, self.current = order, current
        self.races: list[str] = []
        """Pairs of accesses, at least one of them a write, of which neither comes before the other."""
        self.streams: defaultdict[int, set[Stream]] = defaultdict(set)
        """Streams that wrote tensors, by the address of their first element."""
        self.pieces = 0
        """Accesses noted."""
        self._last: defaultdict[int, dict[Span, _Last]] = defaultdict(dict)
        """Accesses of the parts of a storage, by its address."""
        gc.collect()
        # Kept alive, so that no other tensor gets their addresses.
        tensors = [
            each for each in gc.get_objects() if type(each) in (Tensor, Parameter)
        ]
        self._held = [
            each.untyped_storage() for each in tensors if each.layout is torch.strided
        ]
        self._watched = {
            storage.data_ptr() for storage in self._held if storage.nbytes()
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        given = {
            each.name: args[i] if i < len(args) else kwargs.get(each.name)
            for i, each in enumerate(arguments)
        }
        for argument in () if func.is_view else arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            values = given[argument.name]
            for tensor in values if isinstance(values, list | tuple) else (values,):
                if isinstance(tensor, Tensor):
                    # Operators on a block that all envs share say which env's row they use.
                    self._access(
                        tensor[given["env"]] if writes and "env" in given else tensor,
                        writes,
                        str(func),
                    )
        return func(*args, **kwargs)

    def _access(self, tensor: Tensor, writes: bool, name: str) -> None:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in self._watched or not tensor.numel():
            return
        self.pieces += 1
        stream, span = self.current(), _span(tensor)
        for (start, end), last in self._last[storage].items():
            if start < span[1] and span[0] < end:
                for other, number in (
                    *last.writes.items(),
                    *(last.reads.items() if writes else ()),
                ):
                    if not self.order.before(stream, other, number):
                        self.races.append(
                            f"{name} on {stream} is in no order with work on {other}"
                        )
        last = self._last[storage].setdefault(span, _Last({}, {}))
        (last.writes if writes else last.reads)[stream] = self.order.work(stream)
        if writes:
            self.streams[span[0]].add(stream)

    @contextmanager
    def ordered(self) -> Iterator[Accesses]:
        """Notes accesses within the block, at whose end there was something to note and nothing was out of order."""
        with self:
            yield self
        assert self.pieces
        assert not self.races, "\n".join(self.races)


def _span(tensor: Tensor) -> Span:
    """The first address of a tensor, and the one after its last."""
    last = sum(
        (size - 1) * stride
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def touch(tensor: Tensor) -> None:
    """Reads and writes ``tensor``, without changing it."""
    with torch.no_grad():
        tensor.mul_(1)
