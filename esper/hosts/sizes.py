"""Hosts of the same kind in other widths, such as the one nearest to a number of parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from esper.config import ConfigError
from esper.hosts.cnn import CNNHost
from esper.hosts.host import Host
from esper.hosts.transformer import TransformerHost


@dataclass(frozen=True)
class HostFamily:
    """Hosts of one kind in any width, as ``Task.build_host``, so that a custom network can be widened.

    Calling it makes the host of ``width``.
    """

    build: Callable[[int], Host]
    """Makes the host of a width; more parameters for a larger one, and the same slots."""
    width: int
    """Width of the host that a call makes: channels of a CNN's first block, or features of a transformer's token."""
    step: int = 1
    """Widths are multiples of it, such as the number of heads of a transformer."""

    def __post_init__(self) -> None:
        if self.step < 1 or self.width < 1 or self.width % self.step:
            raise ConfigError(f"HostFamily: width is {self.width}; it must be a positive multiple of step, {self.step}")

    def __call__(self) -> Host:
        return self.build(self.width)


def nearest_in_size(
    build_host: Callable[[], Host],
    parameters: int,
    sample: Tensor,
) -> HostFamily:
    """Returns the family of ``build_host``, at the width of its host that is nearest in size to ``parameters``.

    No host is narrower than that of ``build_host``, and a tie goes to the smaller one. A CNNHost is widened by its
    ``base``, a TransformerHost by its ``width``, in steps of its number of heads, the host of a :class:`HostFamily` as
    that says. ``sample`` are inputs that initialise the lazy layers of the last kind. Raises ConfigError for a host of
    another kind.
    """
    family = _family(build_host)

    def difference(width: int) -> int:
        if family is build_host:
            host = family.build(width)
            host.probe(sample)
        else:
            with torch.device("meta"):
                host = family.build(width)
        return abs(host.parameter_count - parameters)

    width = family.width
    least = difference(width)
    while True:
        wider = width + family.step
        reached = difference(wider)
        if reached >= least:
            return replace(family, width=width)
        width = wider
        least = reached


def at_width(build_host: Callable[[], Host], width: int) -> Callable[[], Host]:
    """Returns a factory of hosts like those of ``build_host``, narrower or wider: those of ``width``, see HostFamily.

    Raises ConfigError for a host of another kind, or for a width that such a host cannot have.
    """
    family = _family(build_host)
    if width < 1 or width % family.step:
        multiple = f"a multiple of {family.step}" if family.step > 1 else "1 or more"
        raise ConfigError(f"this task's host cannot have width {width}: give {multiple}; it has {family.width}")
    return partial(family.build, width)


def _family(build_host: Callable[[], Host]) -> HostFamily:
    """Returns the family of the hosts that ``build_host`` makes."""
    if isinstance(build_host, HostFamily):
        return build_host
    host = build_host()
    if type(host) is CNNHost:
        return HostFamily(host.of_width, host.width)
    if type(host) is TransformerHost:
        return HostFamily(host.of_width, host.width, host.heads)
    raise ConfigError(
        f"cannot widen a {type(host).__name__}: give its task a factory of a width, "
        "build_host=esper.HostFamily(build, width), where build(width) makes the host"
    )
