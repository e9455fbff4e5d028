"""Blending: operators, the gate and its input, and the scale of a delta at birth."""

import pytest
import torch
from torch import Tensor, nn

from esper.lifecycle.ramps import STYLES, AlphaCurve, BlendOperator
from esper.seeds.blend import Seed, gate_parameters, running_mean
from esper.spaces.action import ALPHA_CURVES
from esper.spaces.action import STYLES as STYLE_NAMES

WIDTHS = (1, 3, 4, 6, 8, 16, 17, 24, 32, 48, 64, 96)


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("width", WIDTHS)
def test_the_gate_has_the_parameters_it_states(width: int) -> None:
    size = max(8, width // 4)
    expected = (width * size + size) + (size * 1 + 1)
    for topology in ("cnn", "transformer", "mlp", "of a user"):
        plain = count(Seed(nn.Identity(), BlendOperator.ADD, width, topology))
        gated = count(Seed(nn.Identity(), BlendOperator.GATE, width, topology))
        assert (plain, gated) == (0, expected)
    assert gate_parameters(width) == expected


def test_the_operators_are_what_they_say() -> None:
    h = torch.randn(4, 6, 2, 2)
    body = nn.Conv2d(6, 6, 1)
    f = body(h)
    torch.testing.assert_close(Seed(body, BlendOperator.ADD, 6, "cnn")(h), f)
    torch.testing.assert_close(
        Seed(body, BlendOperator.MULTIPLY, 6, "cnn")(h), h * torch.tanh(f)
    )
    gated = Seed(body, BlendOperator.GATE, 6, "cnn")
    first, last = (layer for layer in gated.modules() if isinstance(layer, nn.Linear))
    g = torch.sigmoid(last(nn.functional.silu(first(h.mean(dim=(2, 3))))))
    assert g.shape == (4, 1)
    torch.testing.assert_close(gated(h), g.reshape(4, 1, 1, 1) * f)


def test_the_names_a_controller_can_choose_are_those_of_the_seeds() -> None:
    assert tuple(STYLES) == STYLE_NAMES
    assert tuple(curve.value for curve in AlphaCurve) == ALPHA_CURVES


def test_the_gate_of_a_sequence_sees_the_mean_so_far() -> None:
    """Position t holds 10 t, t from 1: the means are 10, 15, 20, 25."""
    h = torch.tensor([10.0, 20.0, 30.0, 40.0])[None, :, None].expand(2, 4, 3)
    expected = torch.tensor([10.0, 15.0, 20.0, 25.0])[None, :, None].expand(2, 4, 3)
    assert torch.equal(running_mean(h), expected)
    assert torch.equal(
        running_mean(h.reshape(2, 2, 2, 3)), expected.reshape(2, 2, 2, 3)
    )
    assert running_mean(h.double()).dtype == torch.float64


def test_the_mean_over_a_long_sequence_is_as_exact_in_bfloat16() -> None:
    """A count of 257 is no bfloat16 number, nor are most sums of that size."""
    h = torch.rand(2, 2000, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(running_mean(h), running_mean(h.float()).bfloat16())


def gate_of(seed: Seed, pooled: Tensor) -> Tensor:
    assert isinstance(seed.gate, nn.Sequential)
    first, last = seed.gate[0], seed.gate[2]
    return torch.sigmoid(last(nn.functional.silu(first(pooled))))


@pytest.mark.parametrize("topology", ["transformer", "mlp", "of a user"])
def test_the_gate_of_channels_last_is_one_number_a_position(topology: str) -> None:
    torch.manual_seed(0)
    body = nn.Linear(6, 6)
    seed = Seed(body, BlendOperator.GATE, 6, topology)
    rows, sequence = torch.randn(4, 6), torch.randn(4, 5, 6)
    g = gate_of(seed, rows)
    assert g.shape == (4, 1)
    torch.testing.assert_close(seed(rows), g * body(rows))
    for t in range(5):
        g = gate_of(seed, sequence[:, : t + 1].mean(dim=1))
        torch.testing.assert_close(seed(sequence)[:, t], g * body(sequence[:, t]))


def test_the_gate_of_an_image_is_one_number_a_sample() -> None:
    """Images of one colour have the delta of that colour as a row."""
    torch.manual_seed(0)
    images = Seed(nn.Identity(), BlendOperator.GATE, 3, "cnn")
    rows = Seed(nn.Identity(), BlendOperator.GATE, 3, "mlp")
    rows.load_state_dict(images.state_dict())
    means = torch.randn(4, 3)
    h = means[:, :, None, None].expand(4, 3, 5, 5)
    torch.testing.assert_close(images(h), rows(means)[:, :, None, None].expand_as(h))
