"""Hosts of the same kind in other widths, such as the one nearest to a number of parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
    make, own, step = _family(host)

    def sized(width: int) -> Sized:
        with torch.device("meta"):
            return Sized(partial(make, width), width, make(width).parameter_count)

    best, wider = sized(own), sized(own + step)
    while abs(wider.parameters - parameters) < abs(best.parameters - parameters):
        best, wider = wider, sized(wider.width + step)
    return best


def at_width(host: Host, width: int) -> Callable[[], Host]:
    """Returns a factory of hosts like ``host``, narrower or wider, with a ``width`` as in :class:`Sized`.

    Raises ConfigError for a host of another kind, or for a width that such a host cannot have.
    """
    make, own, step = _family(host)
    if width < 1 or width % step:
        multiple = f"a multiple of its {step} heads" if step > 1 else "1 or more"
        raise ConfigError(f"a {type(host).__name__} cannot have width {width}: give {multiple}; the task's has {own}")
    return partial(make, width)


def _family(host: Host) -> tuple[Callable[[int], Host], int, int]:
    """Returns a factory of hosts like ``host`` by width, the width of ``host``, and the step between widths."""
    if type(host) is CNNHost:
        return host.of_width, host.width, 1
    if type(host) is TransformerHost:
        return host.of_width, host.width, host.heads
    raise ConfigError(
        f"cannot widen a {type(host).__name__}: only Esper's own convolutional and transformer hosts have a width "
        "that can be set"
    )
