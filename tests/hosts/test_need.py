"""Need: the share of a wanted change that the inputs of a layer cannot express."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from esper.config import ConfigError
from esper.core.blueprints.adapted import adapt
from esper.core.place import Place
from esper.hosts.need import (
    MAX_INPUTS,
    columns_of,
    inexpressible,
    measured_at,
    measured_layer,
    needs_at,
    rows_of,
)
from tests.hosts.grown_modules import KINDS, Kind


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def halves(of: Callable[[Tensor], Tensor], samples: int = 4000) -> Tensor:
    """The share that inputs cannot express of a wanted change, which is a function of the inputs."""
    found = []
    for seed in (1, 2):
        b = draws(samples, 3, seed=seed)
        found.append((b, of(b)))
    return inexpressible(*found)


def test_a_change_that_is_linear_in_the_inputs_can_be_expressed() -> None:
    weights = draws(3, 2)
    assert float(halves(lambda b: b @ weights)) < 0.05


def test_chance_and_what_is_not_linear_in_the_inputs_cannot_be_expressed() -> None:
    def chance(b: Tensor) -> Tensor:
        return draws(len(b), 2, seed=int(1e6 * abs(b[0, 0])))

    assert abs(float(halves(chance)) - 1) < 0.05
    assert abs(float(halves(lambda b: b[:, :1] * b[:, 1:])) - 1) < 0.05


def test_the_share_of_a_mixed_change_is_that_of_its_other_part() -> None:
    # Variances 1 of what is linear and 3 of what is not.
    share = float(halves(lambda b: b[:, :1] + 3**0.5 * b[:, 1:2] * b[:, 2:]))
    assert abs(share - 0.75) < 0.05


def test_few_samples_show_chance_as_inexpressible_on_average() -> None:
    shares = []
    for seed in range(0, 400, 2):
        parts = [
            (draws(16, 12, seed=seed + k), draws(16, 4, seed=999 + seed + k))
            for k in range(2)
        ]
        shares.append(float(inexpressible(*parts)))
    assert abs(sum(shares) / len(shares) - 1) < 0.1


def test_dead_inputs_and_changes_of_zero_are_no_error() -> None:
    b, v = torch.zeros(8, 3), draws(8, 2)
    assert float(inexpressible((b, v), (b, v))) == 1.0
    assert inexpressible((b, 0 * v), (b, 0 * v)).isnan()


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(5, 3), (4, 5)),
        (nn.Linear(5, 3), (4, 6, 5)),
        (nn.Conv2d(2, 3, 3, stride=2, padding=1), (4, 2, 7, 6)),
        (nn.Conv2d(2, 3, (1, 3), dilation=2, bias=False), (4, 2, 5, 6)),
        (nn.Conv1d(2, 3, 3, padding=1), (4, 2, 6)),
    ],
)
def test_rows_and_columns_are_those_of_the_gradient_of_the_weights(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    inputs = draws(*shape)
    outputs = layer(inputs)
    gradient = draws(*outputs.shape)
    (wanted,) = torch.autograd.grad(outputs, [layer.weight], gradient)
    found = columns_of(layer, gradient).T @ rows_of(layer, inputs)
    torch.testing.assert_close(found.view_as(wanted), wanted)


@pytest.mark.parametrize(
    ("layer", "measured"),
    [
        (nn.Linear(MAX_INPUTS, 2), True),
        (nn.Linear(MAX_INPUTS + 1, 2), False),
        (nn.Conv2d(MAX_INPUTS // 4, 2, 2), True),
        (nn.Conv2d(MAX_INPUTS // 4, 2, 3), False),
        (nn.Conv2d(4, 4, 3, groups=4), False),
        (nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), False),
        (nn.Conv3d(2, 2, 1), False),
        (nn.ReLU(), False),
        (None, False),
    ],
)
def test_layers_that_are_measured(layer: nn.Module | None, measured: bool) -> None:
    assert measured_layer(layer) is measured


def place_of(layer: nn.Module) -> Place:
    return Place("r3c0", 4, has_source=True, layers=(layer,))


@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_of_a_lora_is_measured_only_if_it_is_frozen(kind: Kind) -> None:
    layer = kind(nn.Linear(3, 4))
    assert measured_at(place_of(layer)) is None
    layer.requires_grad_(False)
    assert measured_at(place_of(layer)) is layer
    adapt(layer, 2)
    assert measured_at(place_of(layer)) is layer


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_layer_needs_a_lora_for_what_its_weights_could_change(
    kind: Kind,
) -> None:
    ordinary = nn.Linear(3, 4)
    nn.init.zeros_(ordinary.bias)
    layer = kind(ordinary).requires_grad_(False)
    target = ordinary.weight.detach() + draws(4, 3, seed=7)
    noise = draws(4000, 4, seed=8)

    def needs(wanted: Callable[[Tensor], Tensor]) -> float:
        losses = []
        for seed in (1, 2):
            x = draws(4000, 3, seed=seed)
            losses.append(
                lambda x=x: functional.mse_loss(layer(x), wanted(x))  # type: ignore[misc]
            )
        return needs_at({"r3c0": place_of(layer)}, *losses)["r3c0"]

    linear = needs(lambda x: x @ target.T)
    chance = needs(lambda x: layer(x) + noise)
    loss = float(functional.mse_loss(layer(draws(4000, 3)), draws(4000, 3) @ target.T))
    assert 0.8 * loss < linear < 1.2 * loss
    assert abs(chance) < 0.05
    assert layer.weight.grad is None


def test_a_loss_without_the_model_is_an_error() -> None:
    layer = nn.Linear(3, 4).requires_grad_(False)
    with pytest.raises(ConfigError, match="took no part"):
        needs_at(
            {"r3c0": place_of(layer)}, lambda: torch.ones(()), lambda: torch.ones(())
        )
