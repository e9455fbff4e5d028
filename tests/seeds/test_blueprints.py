"""Blueprints of convolutional hosts, blend operators and the registry: exact sizes, shapes, errors."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from esper.lifecycle.ramps import STYLES, AlphaCurve, BlendOperator
from esper.seeds.blend import Seed, gate_parameters
from esper.seeds.blueprints import BLUEPRINTS, BlueprintRegistry
from esper.seeds.blueprints.cnn import group_norm
from esper.spaces.action import ALPHA_CURVES
from esper.spaces.action import STYLES as STYLE_NAMES

NAMES = ("norm", "attention", "conv_small", "bottleneck", "depthwise", "conv_light", "conv_heavy")
WIDTHS = (1, 3, 4, 6, 8, 16, 17, 24, 32, 48, 64, 96)


def hidden(c: int) -> int:
    return max(4, c // 4)


# Counted by hand: GroupNorm 2C, scale C, 3x3 9C^2, depthwise 9C, 1x1 C^2, two Linear layers with bias.
FORMULAS: dict[str, Callable[[int], int]] = {
    "norm": lambda c: 2 * c,
    "attention": lambda c: (c * hidden(c) + hidden(c)) + (hidden(c) * c + c) + c,
    "conv_small": lambda c: c * c + 2 * c + c,
    "bottleneck": lambda c: (
        (c * hidden(c) + 2 * hidden(c)) + (9 * hidden(c) ** 2 + 2 * hidden(c)) + (hidden(c) * c + 2 * c) + c
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


@pytest.mark.parametrize("topology", ["cnn", "transformer", "mlp"])
def test_the_page_about_growing_names_every_blueprint(topology: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "growing.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| `{topology}`"))
    assert re.findall(r"`(\w+)`", row.split("|")[3]) == list(BLUEPRINTS.names(topology))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_blueprint_has_exactly_the_parameters_it_states(name: str, width: int) -> None:
    blueprint = BLUEPRINTS.get("cnn", name)
    assert count(blueprint.build(width)) == blueprint.parameters(width) == FORMULAS[name](width)
    assert blueprint.description


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("conv_small", 304), ("bottleneck", 336), ("depthwise", 448), ("conv_light", 2352), ("conv_heavy", 4688)],
)
def test_sizes_at_sixteen_channels(name: str, parameters: int) -> None:
    assert count(BLUEPRINTS.get("cnn", name).build(16)) == parameters


@pytest.mark.parametrize("width", WIDTHS)
def test_the_gate_has_the_parameters_it_states(width: int) -> None:
    size = max(8, width // 4)
    expected = (width * size + size) + (size * 1 + 1)
    for topology in ("cnn", "transformer", "mlp", "of a user"):
        plain = count(Seed(nn.Identity(), BlendOperator.ADD, width, topology))
        gated = count(Seed(nn.Identity(), BlendOperator.GATE, width, topology))
        assert (plain, gated) == (0, expected)
    assert gate_parameters(width) == expected


@pytest.mark.parametrize(
    ("channels", "groups"), [(1, 1), (3, 1), (16, 1), (31, 1), (32, 2), (48, 2), (64, 4), (512, 32), (1024, 32)]
)
def test_group_norm_takes_the_most_groups_that_leave_sixteen_channels(channels: int, groups: int) -> None:
    assert group_norm(channels).num_groups == groups


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("width", [3, 6, 17, 32])
def test_a_seed_keeps_the_shape_and_is_born_small(name: str, style: str, width: int) -> None:
    torch.manual_seed(0)
    seed = Seed(BLUEPRINTS.get("cnn", name).build(width), STYLES[style].operator, width, "cnn")
    h = torch.relu(torch.randn(16, width, 4, 4))
    delta = seed(h).detach()
    assert delta.shape == h.shape
    assert 0 < float(delta.square().mean().sqrt()) < 0.5 * float(h.square().mean().sqrt())


def test_the_operators_are_what_they_say() -> None:
    h = torch.randn(4, 6, 2, 2)
    body = nn.Conv2d(6, 6, 1)
    f = body(h)
    torch.testing.assert_close(Seed(body, BlendOperator.ADD, 6, "cnn")(h), f)
    torch.testing.assert_close(Seed(body, BlendOperator.MULTIPLY, 6, "cnn")(h), h * torch.tanh(f))
    gated = Seed(body, BlendOperator.GATE, 6, "cnn")
    first, last = (layer for layer in gated.modules() if isinstance(layer, nn.Linear))
    g = torch.sigmoid(last(nn.functional.silu(first(h.mean(dim=(2, 3))))))
    assert g.shape == (4, 1)
    torch.testing.assert_close(gated(h), g.reshape(4, 1, 1, 1) * f)


def test_the_names_a_controller_can_choose_are_those_of_the_seeds() -> None:
    assert tuple(STYLES) == STYLE_NAMES
    assert tuple(curve.value for curve in AlphaCurve) == ALPHA_CURVES


@pytest.mark.finding("H6")
def test_an_unknown_blueprint_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'conv_ligth'") as caught:
        BLUEPRINTS.get("cnn", "conv_ligth")
    assert all(name in str(caught.value) for name in NAMES)
    with pytest.raises(ValueError, match="unknown blueprint 'norm' for perceptron"):
        BLUEPRINTS.get("perceptron", "norm")


def test_a_topology_has_each_name_once() -> None:
    registry = BlueprintRegistry()

    def identity(_channels: int) -> nn.Module:
        """Nothing at all.

        More text that is not the description.
        """
        return nn.Identity()

    registry.register("cnn", "own", parameters=lambda _c: 0)(identity)
    registry.register("other", "own", parameters=lambda _c: 0)(identity)
    with pytest.raises(ValueError, match="already has a blueprint named 'own'"):
        registry.register("cnn", "own", parameters=lambda _c: 0)(nn.Identity)
    assert registry.names("cnn") == ("own",)
    assert registry.get("cnn", "own").description == "Nothing at all."


def test_a_copy_of_the_registry_does_not_see_later_blueprints() -> None:
    registry = BLUEPRINTS.copy()
    registry.register("cnn", "later", parameters=lambda _c: 0)(lambda _c: nn.Identity())
    assert "later" in registry.names("cnn")
    assert "later" not in BLUEPRINTS.names("cnn")
    assert "later" not in BLUEPRINTS.copy().names("cnn")


def code_of(file: str, made: nn.Module) -> dict[str, Any]:
    """Runs a file that defines a function, a class and a factory of functions, all called body."""
    scope: dict[str, Any] = {"made": made, "__name__": file}
    exec(
        "def body(channels): return made\n"
        "class Bodies:\n    def body(self, channels): return made\n"
        "def factory():\n    def body(channels): return made\n    return body\n",
        scope,
    )
    return scope


def test_a_blueprint_is_replaced_when_its_code_runs_again_and_by_nothing_else() -> None:
    registry = BlueprintRegistry()
    register = registry.register("cnn", "body", parameters=lambda channels: 0)
    for made in (nn.Identity(), nn.ReLU()):
        register(code_of("a_file", made)["body"])
    assert registry.names("cnn") == ("body",)
    assert isinstance(registry.get("cnn", "body").build(1), nn.ReLU)
    again, other = code_of("a_file", nn.Tanh()), code_of("another_file", nn.Tanh())
    for build in (other["body"], again["factory"](), again["Bodies"]().body, lambda channels: nn.Tanh()):
        with pytest.raises(ValueError, match="cnn already has a blueprint named 'body'"):
            register(build)
    made_twice = registry.register("cnn", "made", parameters=lambda channels: 0)
    made_twice(again["factory"]())
    with pytest.raises(ValueError, match="already has a blueprint named 'made'"):
        made_twice(again["factory"]())
