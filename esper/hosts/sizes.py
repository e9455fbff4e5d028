"""Hosts of one kind in other sizes: which width comes nearest to a number of parameters."""

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
    """A host of another width."""

    build: Callable[[], Host]
    width: int
    """Channels of the first block, or features of a token."""
    parameters: int


def nearest_in_size(host: Host, parameters: int) -> Sized:
    """The host like ``host``, no narrower, whose number of parameters is nearest to ``parameters``; of two equally
    near ones the smaller. A CNNHost is widened by its ``base``, a TransformerHost by its ``width``, a step a head.

    Raises ConfigError for a host of another kind: how to widen it is not known.
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
    """What makes hosts like ``host``, narrower or wider, with ``width`` as :class:`Sized` counts it.

    Raises ConfigError for a host of another kind, or a width that such a host cannot have.
    """
    make, least, step = _family(host)
    if width < 1 or width % step:
        multiple = f"a multiple of its {step} heads" if step > 1 else "1 or more"
        raise ConfigError(f"a {type(host).__name__} cannot have width {width}: give {multiple}; the task's has {least}")
    return partial(make, width)


def _wider(host: Host) -> Iterator[tuple[int, Callable[[], Host]]]:
    """Widths from that of ``host`` on, and what makes hosts of each."""
    make, least, step = _family(host)
    for width in count(least, step):
        yield width, partial(make, width)


def _family(host: Host) -> tuple[Callable[[int], Host], int, int]:
    """What makes hosts like ``host`` of any width, the width of ``host``, and the step from one width to the next."""
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
