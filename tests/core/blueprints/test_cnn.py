"""Blueprints of convolutional hosts: sizes, shapes, and size at birth."""

from collections.abc import Callable

import pytest
from torch import nn

from esper.core.blueprints import BLUEPRINTS
from esper.core.blueprints.cnn import group_norm

NAMES = (
    "norm",
    "attention",
    "conv_small",
    "bottleneck",
    "depthwise",
    "conv_light",
    "conv_heavy",
)


WIDTHS = (1, 3, 4, 6, 8, 16, 17, 24, 32, 48, 64, 96)


def hidden(c: int) -> int:
    return max(4, c // 4)


# Counted by hand: GroupNorm 2C, scale C, 3x3 9C^2, depthwise 9C, 1x1 C^2, two Linear layers with bias.
FORMULAS: dict[str, Callable[[int], int]] = {
    "norm": lambda c: 2 * c,
    "attention": lambda c: (c * hidden(c) + hidden(c)) + (hidden(c) * c + c) + c,
    "conv_small": lambda c: c * c + 2 * c + c,
    "bottleneck": lambda c: (
        (c * hidden(c) + 2 * hidden(c))
        + (9 * hidden(c) ** 2 + 2 * hidden(c))
        + (hidden(c) * c + 2 * c)
        + c
    ),
    "depthwise": lambda c: 9 * c + c * c + 2 * c + c,
    "conv_light": lambda c: 9 * c * c + 2 * c + c,
    "conv_heavy": lambda c: 2 * (9 * c * c + 2 * c) + c,
}


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_the_blueprints_are_registered_in_this_order() -> None:
    """A controller's choices and its observation are indices into this list."""
    assert BLUEPRINTS.names("cnn") == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_blueprint_has_exactly_the_parameters_it_states(
    name: str, width: int
) -> None:
    blueprint = BLUEPRINTS.get("cnn", name)
    assert (
        count(blueprint.build(width))
        == blueprint.parameters(width)
        == FORMULAS[name](width)
    )
    assert blueprint.description


@pytest.mark.parametrize(
    ("channels", "groups"),
    [
        (1, 1),
        (3, 1),
        (16, 1),
        (31, 1),
        (32, 2),
        (48, 2),
        (64, 4),
        (512, 32),
        (1024, 32),
    ],
)
def test_group_norm_takes_the_most_groups_that_leave_sixteen_channels(
    channels: int, groups: int
) -> None:
    assert group_norm(channels).num_groups == groups
