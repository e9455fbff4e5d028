"""Hosts of the same kind in other widths, such as the one nearest to a number of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch

from esper.config import ConfigError
from esper.hosts.cnn import CNNHost
from esper.hosts.host import Host
from esper.hosts.transformer import TransformerHost


@dataclass(frozen=True)
class Sized:
    """A factory of hosts of another width, and their size."""

    build: Callable[[], Host]
    width: int
    """Channels of the first block of a CNN, or features of a transformer's token."""
    parameters: int


def nearest_in_size(host: Host, parameters: int) -> Sized:
    """Finds the host like ``host``, no narrower, whose number of parameters is nearest to ``parameters``.

    A tie goes to the smaller host. A CNNHost is widened by its ``base``, a TransformerHost by its ``width``, in steps
    of its number of heads. Raises ConfigError for a host of another kind.
    """
    best: Sized | None = None
    for width, build in _wider(host):
        with torch.device("meta"):
            found = Sized(build, width, build().parameter_count)
        if best is not None and abs(found.parameters - parameters) >= abs(best.parameters - parameters):
            break
        best = found
    assert best is not None
    return best


def at_width(host: Host, width: int) -> Callable[[], Host]:
    """Returns a factory of hosts like ``host``, narrower or wider, with a ``width`` as in :class:`Sized`.

    Raises ConfigError for a host of another kind, or for a width that such a host cannot have.
    """
    make, least, step = _family(host)
    if width < 1 or width % step:
        multiple = f"a multiple of its {step} heads" if step > 1 else "1 or more"
        raise ConfigError(f"a {type(host).__name__} cannot have width {width}: give {multiple}; the task's has {least}")
    return partial(make, width)


def _wider(host: Host) -> Iterator[tuple[int, Callable[[], Host]]]:
    """Yields widths from that of ``host`` on, each with a factory."""
    make, least, step = _family(host)
    for width in count(least, step):
        yield width, partial(make, width)


def _family(host: Host) -> tuple[Callable[[int], Host], int, int]:
    """Returns a factory of hosts like ``host`` by width, the width of ``host``, and the step between widths."""
    make: Callable[[int], Host]
    if type(host) is CNNHost:
        in_channels, classes, least, blocks, kernel, pool, pool_last, rows = host.arguments
        make = lambda base: CNNHost(in_channels, classes, base, blocks, kernel, pool, pool_last, rows)  # noqa: E731
        step = 1
    elif type(host) is TransformerHost:
        vocabulary, least, layers, heads, block, slots = host.arguments
        make = lambda width: TransformerHost(vocabulary, width, layers, heads, block, slots)  # noqa: E731
        step = heads
    else:
        raise ConfigError(
            f"cannot widen a {type(host).__name__}: only Esper's own convolutional and transformer hosts "
            "have a width that can be set"
        )
    return make, least, step
