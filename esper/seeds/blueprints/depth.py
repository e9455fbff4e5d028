"""Blueprints that make a host deeper, for places behind blocks that return features of the shape that they read.

Copies begin with the weights of trained blocks, and with what the optimizer knows of them: stacking, as in Gong et al.
2019, "Efficient Training of BERT by Progressively Stacking". A new block that returns its input changes nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from esper.seeds.blueprints.registry import Blueprint, BlueprintRegistry
from esper.seeds.place import Place


class Deeper(nn.Module):
    """The change of features h [...] that ``blocks`` make: blocks(h) − h."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, h: Tensor) -> Tensor:
        return self.blocks(h) - h  # type: ignore[no-any-return]


@runtime_checkable
class Renewable(Protocol):
    """A block of a host that can be made anew."""

    def empty(self) -> nn.Module:
        """Makes a new block like this one that returns its input."""


def copied(place: Place, blocks: Callable[[Place], Sequence[nn.Module]]) -> nn.Module:
    """Makes a copy of these blocks of the host."""
    return Deeper(list(map(copy.deepcopy, blocks(place))))


def emptied(place: Place) -> nn.Module:
    """Makes a new block that returns its input."""
    block = place.group[-1]
    assert isinstance(block, Renewable)
    return Deeper([block.empty()])


def _size_of(place: Place, blocks: Callable[[Place], Sequence[nn.Module]]) -> int:
    return sum(p.numel() for block in blocks(place) for p in block.parameters())


def _size_of_last(place: Place) -> int:
    return sum(p.numel() for p in place.group[-1].parameters())


def _obstacle_to_copy(place: Place, blocks: Callable[[Place], Sequence[nn.Module]]) -> str | None:
    if blocks(place):
        return None
    return "there are no blocks before it that return features like those that they read"


def _obstacle_to_empty(place: Place) -> str | None:
    if not place.group or not isinstance(place.group[-1], Renewable):
        return "there is no block before it that can be made anew"
    return None


COPIES: Mapping[str, tuple[str, Callable[[Place], Sequence[nn.Module]]]] = MappingProxyType(
    {
        "stack": ("a copy of all blocks, behind the last one", attrgetter("stack")),
        "repeat": ("a copy of the blocks between this place and the one before", attrgetter("group")),
    }
)


def register_in(registry: BlueprintRegistry) -> None:
    """Adds the blueprints of this module to those of transformers, after the others."""
    for name, (words, blocks) in COPIES.items():
        blueprint = Blueprint(
            topology="transformer",
            name=name,
            description=words,
            build=partial(copied, blocks=blocks),
            parameters=partial(_size_of, blocks=blocks),
            takes_place=True,
            copies=blocks,
            obstacle=partial(_obstacle_to_copy, blocks=blocks),
        )
        registry.add(blueprint)
    empty = Blueprint(
        topology="transformer",
        name="empty",
        description="a new block that returns its input; zero at birth",
        build=emptied,
        parameters=_size_of_last,
        takes_place=True,
        zero_at_birth=True,
        obstacle=_obstacle_to_empty,
    )
    registry.add(empty)
